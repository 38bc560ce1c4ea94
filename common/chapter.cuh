// main's body, the same in every chapter: options, data, ranks, the report, and --check, which
// trains chapter 01 on the same samples and compares.
#pragma once

#include "../01_single_gpu/train.cuh"
#include "idx.h"
#include "options.h"
#include "output.h"
#include "ranks.cuh"

// ---- what --check demands -----------------------------------------------------------------

// The largest difference from chapter 01 that passes, relative to the tensor's largest magnitude.
// Where the shapes of all products and the order of all sums are chapter 01's: none.
inline double bit_for_bit(const Config&, int64_t) { return 0; }
// Elsewhere a sum has another order. Each update then differs by a few eps, and updates add up.
inline double rounding(const Config&, int64_t updates) {
  return 64 * std::numeric_limits<real>::epsilon() * std::max<int64_t>(1, updates);
}

template <class Settings>
struct Chapter {
  std::string name, title;
  Result (*train)(const Settings&, const Dataset&, Rank&);
  std::function<double(const Settings&, int64_t updates)> tolerance = rounding;
  // The chapter's own options.
  std::function<void(Settings&, Options&)> options = [](Settings&, Options&) {};
  // Throws BadInput for what the technique cannot do with these settings and this network.
  std::function<void(const Settings&, const Shape&)> refuse = [](const Settings&, const Shape&) {};
};

// The largest difference between two runs, by tensor.
struct Comparison {
  double difference = 0, tolerance = 0;  // NaN or infinite where a number is not finite
  std::string worst = "none", flaw;      // flaw: why the comparison itself would prove nothing
  bool pass() const { return flaw.empty() && difference <= tolerance; }
};

template <class T>
double largest_difference(const T* a, const T* b, int64_t n) {
  double difference = 0, magnitude = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    difference = std::max(difference, std::abs(double(a[i]) - double(b[i])));
    magnitude = std::max(magnitude, std::abs(double(b[i])));
  }
  return difference == 0 ? 0 : difference / magnitude;
}

inline Comparison compare(const Config& config, const Shape& shape, const Result& result,
                          const Result& yardstick, double tolerance) {
  Comparison c;
  c.tolerance = tolerance;
  std::vector<real> initial;
  initial_parameters(shape, config.seed, initial);
  const std::vector<double>& losses = yardstick.losses;
  if (result.weights.size() != initial.size() || yardstick.weights.size() != initial.size() ||
      result.losses.size() != losses.size())
    c.flaw = "a run gave too few numbers";
  else if (yardstick.weights == initial)
    c.flaw = "the weights did not change";
  else if (losses.size() > 1 && std::equal(losses.begin() + 1, losses.end(), losses.begin()))
    c.flaw = "the loss did not change";
  if (!c.flaw.empty()) return c;
  const auto take = [&](const std::string& name, double difference) {
    if (difference > c.difference) c.difference = difference, c.worst = name;
  };
  for_each_tensor(shape, [&](const std::string& name, int64_t at, int rows, int columns) {
    take(name, largest_difference(&result.weights[at], &yardstick.weights[at],
                                  int64_t{rows} * std::max(columns, 1)));
  });
  take("losses", largest_difference(result.losses.data(), losses.data(), losses.size()));
  return c;
}

// ---- options ------------------------------------------------------------------------------

inline void common_options(Config& c, Options& o) {
  const int most = std::numeric_limits<int>::max();
  o.group("data and network");
  o.text("data", "DIR", "the folder of the four IDX files", c.data);
  o.widths("hidden", "D,D,...", "widths of the hidden layers, or none", c.hidden, 1 << 24);
  o.integer("classes", "N", "labels are 0 .. N-1", c.classes, 1, 1 << 24);
  o.group("training");
  o.integer("batch", "B", "samples of one update, over all GPUs together", c.batch, 1, most);
  o.integer("epochs", "E", "passes over the data", c.epochs, int64_t{1}, int64_t{1} << 31);
  o.integer("steps", "T", "updates, instead of --epochs", c.steps, int64_t{0}, int64_t{1} << 31);
  o.number("lr", "RATE", "learning rate at --base-batch", c.lr, 0, false, INFINITY,
           "a number above 0");
  o.number("momentum", "MU", "v = MU v + g; w = w - RATE v", c.momentum, 0, true, 1,
           "a number from 0 to below 1");
  o.choice("lr-scale", {"none", "sqrt", "linear"}, "RATE grows with batch / base-batch",
           c.lr_scale);
  o.integer("base-batch", "B", "the batch that --lr is meant for", c.base_batch, 1, most);
  o.integer("warmup", "W", "updates while the rate rises", c.warmup, int64_t{0}, int64_t{1} << 31);
  o.choice("lr-schedule", {"constant", "cosine"}, "the rate after the warm-up", c.lr_schedule);
  o.integer("seed", "S", "of the initial weights and the order", c.seed, uint64_t{0});
  o.flag("no-shuffle", "take the samples in the files' order", c.shuffle, false);
  o.group("ranks");
  o.integer("gpus", "P", "ranks, one GPU each", c.gpus, 1, 1 << 20);
  o.flag("share-gpu", "ranks are processes, several on a GPU if need be", c.share_gpu);
  o.group("output");
  o.flag("check", "compare with chapter 01; exit status 1 if they differ", c.check);
  o.text("save", "FILE", "write the weights as .safetensors", c.save);
  o.text("report", "FILE", "write settings and results as JSON", c.report);
  o.flag("quiet", "print only errors and the result of --check", c.quiet);
}

// What no chapter can do. Throws BadInput.
inline void refuse_common(const Config& c, const Shape& shape, int64_t samples) {
  const double updates = c.steps >= 0 ? double(c.steps)
                                      : double(c.epochs) * double((samples - 1) / c.batch + 1);
  if (updates * std::min<double>(c.batch, samples) > 0x1p31)
    throw BadInput((c.steps >= 0 ? "--steps " + std::to_string(c.steps)
                                 : "--epochs " + std::to_string(c.epochs)) +
                   ": " + shortest(updates) + " updates read more than 2147483648 samples in all");
  if (c.check && updates == 0) throw BadInput("--check: needs an update, --steps 0 makes none");
  double parameters = 0;
  for (int l = 0; l < shape.layers(); ++l) parameters += double(shape.weight_size(l));
  if (parameters > 0x1p40)
    throw BadInput("--hidden: these widths make " + shortest(parameters) +
                   " weights, at most 1099511627776 would be right");
}

// ---- report -------------------------------------------------------------------------------

inline std::string grouped(int64_t n) {  // 1498 -> "1,498"
  std::string text = std::to_string(n);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}
inline std::string formatted(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}
inline std::string seconds_text(double s) {
  if (s < 1e-3) return formatted("%.4g us", s * 1e6);
  return s < 1 ? formatted("%.4g ms", s * 1e3) : formatted("%.4g s", s);
}

inline void print_heading(const std::string& name, const std::string& title, const Config& c,
                          const Shape& shape, const Data& data) {
  const int64_t n = data.train.size(), total = static_cast<int64_t>(updates(c, n).size());
  std::string widths;
  for (int width : shape.width) widths += (widths.empty() ? "" : "-") + std::to_string(width);
  const char* rules[] = {"the same for any batch", "times sqrt(batch / base batch)",
                         "times batch / base batch"};
  std::printf("%s: %s\n%s training and %s test samples; network %s, %s parameters (%s)\n"
              "%s updates of %d samples on %d GPU%s; learning rate %g, %s\n",
              name.c_str(), title.c_str(), grouped(n).c_str(), grouped(data.test.size()).c_str(),
              widths.c_str(), grouped(shape.parameters()).c_str(),
              sizeof(real) == 8 ? "double" : "float", grouped(total).c_str(), c.batch, c.gpus,
              c.gpus > 1 ? "s" : "", c.lr, rules[static_cast<int>(c.lr_scale)]);
  std::fflush(stdout);
}

// Everything that a run of rank 0 has to say.
struct Report {
  Result result;
  int64_t correct = 0, tested = 0;
  bool checked = false;
  Comparison comparison;

  double accuracy() const { return double(correct) / double(tested); }

  std::string verdict() const {
    const Comparison& c = comparison;
    if (!c.flaw.empty()) return "FAIL: " + c.flaw + ", so nothing was compared";
    return (c.difference == 0 ? "none" : formatted("%.3g", c.difference) + " in " + c.worst) +
           ", allowed " + (c.tolerance == 0 ? "none" : formatted("%.3g", c.tolerance)) +
           (c.pass() ? ": pass" : ": FAIL");
  }

  void print() const {
    const auto row = [](const std::string& name, const std::string& value) {
      std::printf("  %-28s %s\n", name.c_str(), value.c_str());
    };
    if (!result.losses.empty())
      row("loss of the last update", formatted("%.6g", result.losses.back()));
    row("test accuracy", formatted("%.2f %%", 100 * accuracy()) + " (" + grouped(correct) +
                             " of " + grouped(tested) + ")");
    row("step time (GPU's clock)", seconds_text(result.step_seconds));
    row("bytes sent a step, a GPU", grouped(std::llround(result.bytes_sent_per_step)));
    for (const auto& [kind, bytes] : result.bytes_by_kind)
      row("  for " + kind, grouped(std::llround(bytes)));
    row("peak memory a GPU", grouped(result.peak_memory) + " bytes");
    for (const auto& [name, value] : result.extra)  // the report has the whole of a long one
      row(name, value.size() <= 100 ? value : value.substr(0, 97) + "...");
    if (checked) row("difference from chapter 01", verdict());
  }

  std::string as_json(const std::string& chapter, const Options& options) const {
    std::string text = "{\n\"chapter\": " + json(chapter) + ",\n\"real\": \"" +
                       (sizeof(real) == 8 ? "double" : "float") + "\",\n\"settings\": {";
    for (const Option& o : options.all())
      text += (&o == &options.all()[0] ? "" : ", ") + json(o.name) + ": " + json_of_shown(o.show());
    const auto entry = [&text](const std::string& name, const std::string& value) {
      text += ",\n" + json(name) + ": " + value;
    };
    text += "}";
    entry("final_loss", result.losses.empty() ? "null" : json(result.losses.back()));
    entry("test_accuracy", json(accuracy()));
    entry("step_seconds", json(result.step_seconds));
    entry("bytes_sent_per_step", json(result.bytes_sent_per_step));
    for (const auto& [kind, bytes] : result.bytes_by_kind)
      entry("bytes_sent_for_" + kind, json(bytes));
    entry("peak_memory", std::to_string(result.peak_memory));
    entry("check", !checked ? "null" : comparison.pass() ? "\"pass\"" : "\"FAIL\"");
    entry("difference", checked ? json(comparison.difference) : "null");
    entry("worst_tensor", checked ? json(comparison.worst) : "null");
    entry("tolerance", checked ? json(comparison.tolerance) : "null");
    for (const auto& [name, value] : result.extra) entry(name, json_of_shown(value));
    entry("losses", json(result.losses));
    return text + "\n}\n";
  }
};

// Rank 0 reports for all: the largest figure of any rank.
inline std::vector<double> figures_of(const Result& result) {
  std::vector<double> figures = {double(result.peak_memory), result.bytes_sent_per_step};
  for (const auto& [kind, bytes] : result.bytes_by_kind) figures.push_back(bytes);
  return figures;
}
inline void set_figures(Result& result, const std::vector<double>& figures) {
  result.peak_memory = std::llround(figures[0]);
  result.bytes_sent_per_step = figures[1];
  for (size_t i = 0; i < result.bytes_by_kind.size(); ++i)
    result.bytes_by_kind[i].second = figures[2 + i];
}

// Among ranks that are processes.
inline void largest_of_all(std::vector<double>& figures, Rank& rank) {
  const auto n = static_cast<int64_t>(figures.size());
  rank.meet();  // the others may still be freeing what they trained with
  Stream stream;
  Buffer<double> on_gpu(n);
  on_gpu.upload(figures, stream);
  rank.meet();
  rank.world.all_reduce(on_gpu.data(), n, stream, ncclMax);
  on_gpu.download(figures.data(), n, stream);
  rank.wait(stream);
}

// ---- main ---------------------------------------------------------------------------------

// Trains chapter 01 alone on `device` with the same settings.
inline int train_yardstick(const Config& config, const Dataset& data, int device, Result& result) {
  ch01::Settings settings{config};
  settings.gpus = 1;
  ncclUniqueId id = {};
  CHECK(ncclGetUniqueId(&id));
  return run_threads(0, 1, {device}, id, [&](Rank& rank) {
    rank.quiet = true;
    result = ch01::train(settings, data, rank);
  });
}

inline std::string not_finite(const Result& result) {
  for (size_t t = 0; t < result.losses.size(); ++t)
    if (!std::isfinite(result.losses[t]))
      return "the loss of update " + std::to_string(t + 1) +
             " is not finite; a lower --lr may help";
  for (real w : result.weights)
    if (!std::isfinite(w)) return "a weight is not finite; a lower --lr may help";
  return "";
}

template <class Settings>
int run(const Chapter<Settings>& chapter, const Settings& settings, const Options& options,
        char** argv) {
  const Place place = place_from_environment();
  if (place.launched && place.size != settings.gpus)
    throw BadInput("--gpus: " + std::to_string(settings.gpus) + " ranks asked for, the launcher " +
                   "started " + std::to_string(place.size));
  const Data data = load(settings.data, settings.classes);
  const Shape shape = network(settings, data.train.features);
  refuse_common(settings, shape, data.train.size());
  chapter.refuse(settings, shape);
  if (place.rank == 0) {
    refuse_unwritable("--save", settings.save);
    refuse_unwritable("--report", settings.report);
    if (!settings.save.empty() && destination(settings.save) == destination(settings.report))
      throw BadInput("--report: " + settings.report +
                     " is --save's file too; another would be right");
  }

  Report report;
  int device = 0;
  std::mutex mutex;
  std::vector<double> largest;  // of the ranks that are threads here
  const int status = run_ranks(place, settings.gpus, settings.share_gpu, argv, [&](Rank& rank) {
    rank.quiet = settings.quiet;
    if (rank.rank == 0 && !settings.quiet)
      print_heading(chapter.name, chapter.title, settings, shape, data);
    Result result = chapter.train(settings, data.train, rank);
    std::vector<double> figures = figures_of(result);
    if (place.launched) largest_of_all(figures, rank);
    const std::lock_guard lock(mutex);
    largest.resize(figures.size());
    for (size_t i = 0; i < figures.size(); ++i) largest[i] = std::max(largest[i], figures[i]);
    if (rank.rank == 0) report.result = std::move(result), device = rank.device;
  });
  // Ranks that are processes of their own report by themselves.
  const bool reported_here = !report.result.weights.empty();
  if (status || !reported_here) return status;
  set_figures(report.result, largest);

  if (settings.check) {
    Result yardstick;
    if (train_yardstick(settings, data.train, device, yardstick)) return 1;
    const int64_t total = static_cast<int64_t>(yardstick.losses.size());
    report.comparison = compare(settings, shape, report.result, yardstick,
                                chapter.tolerance(settings, total));
    report.checked = true;
  }
  report.correct = count_correct(shape, report.result.weights, data.test);
  report.tested = data.test.size();
  if (!settings.quiet) report.print();
  else if (settings.check)
    std::printf("%s: difference from chapter 01: %s\n", chapter.name.c_str(),
                report.verdict().c_str());
  if (!settings.save.empty()) write_file(settings.save, safetensors(shape, report.result.weights));
  if (!settings.report.empty()) write_file(settings.report, report.as_json(chapter.name, options));
  const std::string trouble = not_finite(report.result);
  if (!trouble.empty()) std::fprintf(stderr, "%s: %s\n", chapter.name.c_str(), trouble.c_str());
  return !trouble.empty() || (settings.check && !report.comparison.pass());
}

// 0: done. 1: a failed run, or a comparison that does not pass. 2: wrong input.
template <class Settings>
int chapter_main(int argc, char** argv, const Chapter<Settings>& chapter) {
  const auto complain = [&](const char* what, int status) {
    std::fprintf(stderr, "%s: %s\n", chapter.name.c_str(), what);
    return status;
  };
  die_with_starter();
  try {
    Settings settings;
    Options options;
    common_options(settings, options);
    options.group(chapter.name);
    chapter.options(settings, options);
    const std::string help = options.help();  // with the defaults, before they are changed
    if (!options.parse_command_line(argc, argv)) {
      std::printf("%s: %s\n%s\nexample: %s --hidden 256,128 --batch 32 --epochs 5 --check\n",
                  chapter.name.c_str(), chapter.title.c_str(), help.c_str(), argv[0]);
      return std::fflush(stdout) ? complain("standard output cannot be written", 1) : 0;
    }
    const int status = run(chapter, settings, options, argv);
    if (std::fflush(stdout) || std::ferror(stdout))  // a verdict that nobody can read is none
      return complain("standard output cannot be written", 1);
    return status ? status : teardown_failed() ? 1 : 0;
  } catch (const BadInput& e) {
    return complain(e.what(), 2);
  } catch (const std::bad_alloc&) {
    return complain("out of host memory", 1);
  } catch (const std::exception& e) {
    return complain(e.what(), 1);
  }
}
