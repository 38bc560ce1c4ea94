// What papers print, beside the formula and beside a run on the virtual clock. Each figure is held
// to its formula here, and docs/papers.md is what these runs say, byte for byte: `make papers`
// writes it (into the file that PAPERS names).
#include <cuda_fp16.h>

#include <set>

#include "../common/chapter.cuh"

#undef CHECK  // the course's is used up by its own headers; from here on it is Catch2's
#include "catch.h"
#include "program.h"

namespace {

using Picoseconds = int64_t;

// ---- a run: as the page shows it, and as it is done here --------------------------------------

struct Run {
  std::string chapter, hardware;
  int gpus;
  std::string options;
  bool math = false;  // else times only, which do not depend on the numbers

  std::string variables() const {
    return (gpus > 8 ? "VIRTUAL_GPU_COUNT=" + std::to_string(gpus) + " " : "") +
           (math ? "" : "VIRTUAL_GPU_SKIP_MATH=1 ");
  }
  std::string command() const {
    return "```sh\n" + variables() + "make -s run-" + chapter.substr(0, 2) +
           " GPUS=" + std::to_string(gpus) + " HARDWARE=" + hardware + " ARGS=\"" + options +
           "\"\n```\n";
  }
};

struct Traced {  // an operation of step 0
  int gpu;
  std::string range;
  bool gemm, all_reduce;
  Picoseconds duration;
  int64_t bytes;
};

struct Ran {
  std::string report;
  std::vector<Traced> trace;

  std::string text(const std::string& entry) const {
    const std::string key = "\"" + entry + "\": ";
    const size_t at = report.find(key);
    REQUIRE(at != std::string::npos);
    const size_t begin = at + key.size(), quote = report[begin] == '"';
    return report.substr(begin + quote,
                         report.find_first_of(quote ? "\"" : ",\n", begin + quote) - begin - quote);
  }
  double number(const std::string& entry) const { return std::stod(text(entry)); }
  double seconds() const { return number("step_seconds"); }
  double bytes() const { return number("bytes_sent_per_step"); }
  // One step, timed to the picosecond; cudaEventElapsedTime hands it over as a float.
  void takes(Picoseconds want) const {
    INFO(seconds() << " s, formula " << want << " ps");
    REQUIRE(static_cast<float>(seconds() * 1e3) == static_cast<float>(want * 1e-9));
  }
};

std::string between(const std::string& line, const std::string& before, const std::string& after) {
  const size_t begin = line.find(before) + before.size();
  return line.substr(begin, line.find(after, begin) - begin);
}

Ran run(const Run& r, bool traced = false) {
  const TemporaryFolder folder;
  const std::string trace = folder.path("t.json"), report = folder.path("r.json");
  const Outcome out = run_command(
      "env " + r.variables() + "VIRTUAL_GPU=" + r.hardware + " " +
      (traced ? "VIRTUAL_GPU_STEPS=0 VIRTUAL_GPU_TRACE=" + trace + " " : "") + program(r.chapter) +
      " --gpus " + std::to_string(r.gpus) + " " + r.options + " --quiet --report " + report);
  INFO(r.command() << out.err);
  REQUIRE(out.status == 0);
  Ran ran{contents(report), {}};
  std::istringstream lines(traced ? contents(trace) : "");
  for (std::string line; std::getline(lines, line);) {
    if (line.find("\"ph\":\"X\"") == std::string::npos) continue;
    std::string picoseconds = between(line, "\"dur\":", ",");
    picoseconds.erase(picoseconds.find('.'), 1);
    const std::string name = between(line, "\"name\":\"", "\"");
    ran.trace.push_back({std::stoi(between(line, "\"pid\":", ",")), name.substr(0, name.find(": ")),
                         line.find("\"cat\":\"gemm\"") != std::string::npos,
                         name.find("ncclAllReduce") != std::string::npos, std::stoll(picoseconds),
                         std::stoll(between(line, "\"bytes\":", ","))});
  }
  return ran;
}

// ---- the page --------------------------------------------------------------------------------

std::string microseconds(Picoseconds t) { return formatted("%.3f us", t * 1e-6); }
std::string percent(double share) { return formatted("%.1f %%", 100 * share); }
std::string whole(double n) { return grouped(std::llround(n)); }

// How far the program is from the paper; more than `most` is no longer what the page explains.
std::string gap(double program, double paper, double most) {
  INFO("program " << program << ", paper " << paper);
  REQUIRE(std::abs(program / paper - 1) <= most);
  return formatted("%+.1f %%", 100 * (program / paper - 1));
}

using Row = std::vector<std::string>;
std::string table(const std::vector<Row>& rows) {
  std::string text;
  for (const Row& row : rows) {
    REQUIRE(row.size() == rows[0].size());
    for (const std::string& cell : row) text += "| " + cell + " ";
    text += "|\n";
    for (size_t i = 0; &row == &rows[0] && i < row.size(); ++i) text += "| --- ";
    if (&row == &rows[0]) text += "|\n";
  }
  return text + "\n";
}

// The same text in lines of at most 100 columns; tables, headings and commands stay as they are.
std::string wrapped(const std::string& text) {
  std::istringstream lines(text);
  std::string page, open;  // the paragraph or item that is being filled
  bool command = false;
  const auto close = [&] {
    std::istringstream words(open);
    std::string line;
    for (std::string word; words >> word; line += (line.empty() ? "" : " ") + word)
      if (line.size() + word.size() >= 100) page += line + "\n", line = open[0] == '-' ? " " : "";
    page += line.empty() ? "" : line + "\n";
    open.clear();
  };
  for (std::string line; std::getline(lines, line);) {
    const bool fence = line.starts_with("```"), as_it_is = line.empty() || line[0] == '|';
    if (as_it_is || fence || command || line[0] == '#' || line[0] == '-') close();
    if (as_it_is || fence || command || line[0] == '#')
      page += line + "\n";
    else
      open += line + " ";
    command ^= fence;
  }
  close();
  return page;
}

const Row heading = {"figure", "formula", "program", "paper", "why the gap"};

// ---- pipelines -------------------------------------------------------------------------------

// Eight layers of 64 x 64, a batch of 64: equal stages on 1, 2, 4 and 8 GPUs, but for layer 0,
// which computes no gradient of the data. In `ideal` a product of the whole batch takes this long:
constexpr Picoseconds product = 2 * 64 * 64 * 64;

Run pipeline(int K, int M, const std::string& schedule, const std::string& more = "") {
  return {"06_pipeline", "ideal", K,
          "--hidden 64,64,64,64,64,64,64 --classes 64 --batch 64 --steps 1 --microbatches " +
              std::to_string(M) + " --schedule " + schedule + more};
}

// (M + (K-1)/v) (tF + tB), less one product of a micro-batch.
Picoseconds makespan(int K, int M, int v = 1) {
  return product / M * (3 * 8 / K * M + 3 * 8 / K * (K - 1) / v - 1);
}

const std::string& gpipe() {
  static const std::string text = [] {
    std::string text = R"(## GPipe

Huang et al. 2018, arXiv 1811.06965.

M micro-batches, K stages: a step is (M+K-1)(tF+tB) long, of which each GPU works M(tF+tB). Eight
equal layers on `ideal` hardware. One thing is not the textbook's: layer 0 needs no gradient of the
data, so stage 0's backward is one product f shorter, and **every step is the formula less f**, to
the picosecond. Throughputs are relative to K = 2, M = 1, as in the paper's table 2, by which the
formula is KM/(M+K-1).

)";
    const double base = run(pipeline(2, 1, "gpipe")).seconds();
    std::vector<Row> rows = {{"M", "K", "formula", "program", "paper, Transformer", "gap",
                              "paper, AmoebaNet-D", "torchgpipe, AmoebaNet-D"}};
    const char* const transformer[] = {"1",   "1.07", "1.3", "1.7", "3.2",
                                       "4.8", "1.8",  "3.4", "6.3"};
    const char* const amoeba[] = {"1",    "1.13", "1.38", "1.07", "1.26",
                                  "1.72", "1.21", "1.84", "3.48"};
    const char* const torchgpipe[] = {"1",     "1.004", "0.932", "1.539", "1.666",
                                      "2.621", "1.773", "2.709", "4.953"};
    const double most[] = {0.01, 0.07, 0.24, 0.1, 0.32, 0.42, 0.04, 0.04, 0.01};
    int at = 0;
    for (const int M : {1, 4, 32})
      for (const int K : {2, 4, 8}) {
        const Ran ran = run(pipeline(K, M, "gpipe"));
        ran.takes(makespan(K, M));
        const double speedup = base / ran.seconds();
        rows.push_back({std::to_string(M), std::to_string(K),
                        formatted("%.2f", double(K) * M / (M + K - 1)), formatted("%.2f", speedup),
                        transformer[at], gap(speedup, std::stod(transformer[at]), most[at]),
                        amoeba[at], torchgpipe[at]});
        ++at;
      }
    text += table(rows) +
            R"(- **M = 32**: within 4 % of the Transformer's row. The program is below the formula
  because it is measured from a step of 24 products less one, 23, where later rows save one product
  of a micro-batch only.
- **M = 1** cannot gain from more stages: one micro-batch overlaps with nothing. The paper's 1.07
  and 1.3 have another cause than the pipeline.
- **M = 4**: the paper is above what a schedule with a flush can reach against its own K = 2, M = 1,
  so that first cell must have been slow for another reason. This is not explained here; M = 32
  depends on it too.
- **AmoebaNet**'s stages are not equal, and the slowest sets the pace. That torchgpipe does better
  on the same network is a matter of implementation and balance, not of the schedule. (Its README's
  ratio of 4.966 disagrees with its own throughputs; 4.953 is theirs.)

)";
    rows = {heading};
    for (const int K : {2, 4, 8}) {
      const int M = 4 * K;
      const Ran ran = run(pipeline(K, M, "gpipe"), true);
      Picoseconds busy = 0;  // of the last stage, which leaves no product out
      for (const Traced& o : ran.trace)
        if (o.gpu == K - 1 && o.gemm) busy += o.duration;
      REQUIRE(busy == product * 3 * 8 / K);
      ran.takes(makespan(K, M));
      rows.push_back({"idle at M = 4K, K = " + std::to_string(K),
                      "(K-1)/(M+K-1) = " + percent((K - 1.0) / (M + K - 1)),
                      percent(1 - busy * 1e-12 / ran.seconds()), "\"negligible\"",
                      K == 2 ? "the paper writes an order, O((K-1)/(M+K-1)); a share of 1/9 to 1/6 "
                               "is small, not nothing"
                             : "as above"});
    }
    return text + table(rows) +
           R"(Seen in: notes by others that quote section 2.3 and table 2 and agree; torchgpipe's
benchmark page. Activation memory O(N + L/K N/M) is with rematerialisation, which this course leaves
out.

)" + pipeline(8, 32, "gpipe").command();
  }();
  return text;
}

// Most micro-batches whose forward has begun on the GPU and whose backward has not ended.
struct InFlight {
  int warm_up = 0, most = 0;
};
InFlight in_flight(const Ran& ran, int gpu) {
  InFlight found;
  std::string last;
  int forwards = 0, backwards = 0;
  for (const Traced& o : ran.trace) {
    if (o.gpu != gpu || !o.gemm || o.range == last) continue;
    last = o.range;  // "F 3", "B 3"
    if (o.range[0] == 'F')
      found.most = std::max(found.most, ++forwards - backwards);
    else if (++backwards == 1)
      found.warm_up = forwards - 1;  // the last one was the steady state's
  }
  return found;
}

const std::string& pipedream() {
  static const std::string text = [] {
    const int p = 4, m = 8;
    std::vector<Row> rows = {{"stage i", "warm-up forwards p-1-i", "program", "in flight p-i",
                              "program, 1F1B", "program, GPipe"}};
    const Ran one = run(pipeline(p, m, "1f1b"), true), all = run(pipeline(p, m, "gpipe"), true);
    for (int i = 0; i < p; ++i) {
      const InFlight a = in_flight(one, i), b = in_flight(all, i);
      REQUIRE(a.warm_up == p - 1 - i);
      REQUIRE(a.most == p - i);
      REQUIRE(b.most == m);
      rows.push_back({std::to_string(i), std::to_string(p - 1 - i), std::to_string(a.warm_up),
                      std::to_string(p - i), std::to_string(a.most), std::to_string(b.most)});
    }
    one.takes(makespan(p, m));
    all.takes(makespan(p, m));
    return R"(## PipeDream and 1F1B

Harlap et al. 2018, arXiv 1806.03377; with a flush: Narayanan et al. 2020, arXiv 2006.09503.

Four stages, eight micro-batches, counted on the timeline of each GPU.

)" + table(rows) +
           R"(- No gap: p - 1 - i and p - i are what PipeDream's code and Megatron-LM's have, p in
  flight at the input stage (NOAM, without replication). GPipe keeps all m.
- With a flush the bubble is GPipe's: both take )" +
           microseconds(makespan(p, m)) +
           R"(, (m+p-1)(tF+tB) less one product.
- PipeDream itself has no flush and stashes p - i versions of the weights. Here there is one
  version, so no gradient is old.

Seen in: the papers' own code (runtime.py, main_with_runtime.py) and Megatron-LM's schedules.py.

)" + pipeline(p, m, "1f1b").command();
  }();
  return text;
}

const std::string& interleaved() {
  static const std::string text = [] {
    const int p = 4, m = 8, v = 2;
    Run plain = pipeline(p, m, "1f1b"), chunks = pipeline(p, m, "interleaved", " --chunks 2");
    plain.math = chunks.math = true;  // which rank sends most the ranks find out by a sum
    const Ran one = run(plain), two = run(chunks);
    one.takes(makespan(p, m));
    two.takes(makespan(p, m, v));
    REQUIRE(one.bytes() == 2.0 * 64 * 64 * sizeof(real));  // a border's activations and gradients
    REQUIRE(two.bytes() == v * one.bytes());
    const double ideal = 24 / p * product * 1e-12;  // m (tF + tB)
    const double gain = one.seconds() / two.seconds() - 1;
    REQUIRE(gain > 0.10);
    const auto row = [&](const std::string& what, double formula, const std::string& as,
                         const Ran& ran) {
      const double bubble = ran.seconds() / ideal - 1;
      REQUIRE(bubble == Approx(formula - 1.0 / 48).epsilon(1e-6));
      return Row{what, as + " = " + percent(formula), percent(bubble), as,
                 "less one product f: 1/48 of the ideal time, 2.1 %"};
    };
    return R"(## Interleaving

Narayanan et al. 2021, Megatron-LM, arXiv 2104.04473.

The paper's bubble is over the **ideal** time m(tF+tB), not over the step. p = 4, m = 8, v = 2
chunks.

)" +
           table({heading,
                  row("bubble, GPipe and 1F1B", double(p - 1) / m, "(p-1)/m", one),
                  row("bubble, interleaved", double(p - 1) / (v * m), "(p-1)/(vm)", two),
                  {"step, interleaved",
                   "(m + (p-1)/v)(tF+tB) - f = " + microseconds(makespan(p, m, v)),
                   microseconds(std::llround(two.seconds() * 1e12)), "", "none"},
                  {"bytes sent, 1F1B to interleaved", "v = 2 times",
                   whole(one.bytes()) + " to " + whole(two.bytes()), "v times",
                   "none, for a rank between others; one at an end sends less"},
                  {"throughput",
                   "(m+p-1)/(m+(p-1)/v) = +" + percent((m + p - 1.0) / (m + (p - 1.0) / v) - 1),
                   "+" + percent(gain), "10+ %",
                   "the paper's is of a real machine, where more messages cost time; here they are "
                   "free"}}) +
           R"(Seen in: notes by others that agree on sections 2.2.1 and 2.2.2; the 10+ % in the
abstract.

)" + chunks.command();
  }();
  return text;
}

// ---- tensors ---------------------------------------------------------------------------------

Run tensor(int layers) {
  std::string hidden = "64";
  for (int l = 2; l < layers; ++l) hidden += ",64";
  return {"05_tensor_parallel", "ideal", 4, "--hidden " + hidden + " --steps 1"};
}

const std::string& megatron() {
  static const std::string text = [] {
    const int B = 64, h = 64, t = 4, classes = 10;
    const auto sums = [](const Ran& ran, const std::string& range = "") {
      int64_t n = 0, bytes = 0;
      for (const Traced& o : ran.trace)
        if (o.gpu == 0 && o.all_reduce && (range.empty() || o.range == range))
          ++n, bytes += o.bytes;
      return std::pair(n, bytes);
    };
    const Ran three = run(tensor(3), true), four = run(tensor(4), true), six = run(tensor(6), true);
    const auto [n4, bytes4] = sums(four);
    const auto [n6, bytes6] = sums(six);
    const auto [n_loss, loss_bytes] = sums(three, "loss");
    REQUIRE(n6 - n4 == 2);
    REQUIRE(n4 == 4 / 2 + 4 / 2 - 1);
    REQUIRE(four.bytes() == double(bytes4));
    const double elements = 2.0 * (bytes6 - bytes4) / sizeof(real) / (B * h);
    REQUIRE(elements == 8.0 * (t - 1) / t);
    REQUIRE(n_loss == 2);
    REQUIRE(loss_bytes == std::llround(n_loss * 2.0 * (t - 1) / t * B * sizeof(real)));
    return R"(## Tensor parallelism

Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053.

Column-parallel, then row-parallel. Four GPUs, b = 64 samples (the paper's b s), h = 64; counted on
the timeline, as what two more layers (6 instead of 4) add.

)" +
           table(
               {heading,
                {"all-reduces a column-row pair", "1 forward + 1 backward", std::to_string(n6 - n4),
                 "2 (4 a Transformer layer, which is two pairs)", "none"},
                {"of a whole network of L layers, L even", "L/2 + L/2 - 1 = 3 for L = 4",
                 std::to_string(n4), "",
                 "layer 0's backward needs none: nobody wants the data's gradient"},
                {"elements sent a Transformer layer, a GPU", "4 x 2(t-1)/t bh = 8(t-1)/t bh",
                 formatted("%g bh", elements), "8 bsh(t-1)/t = 6 bsh",
                 "none; two of our pairs. These are elements: times 4 bytes here, 2 in fp16"},
                {"loss on split classes", "messages of b, not of b x classes",
                 std::to_string(n_loss) + " of " + std::to_string(B) + " numbers, not " +
                     std::to_string(B * classes),
                 "b s instead of b s v",
                 "none; two, the row's maximum and the sum of exponentials"}}) +
           R"(Seen in: notes by others that agree on section 3; the elements are section 3.2 of
arXiv 2104.04473, in one such note, and computed again.

)" + tensor(6).command();
  }();
  return text;
}

// ---- data parallelism ------------------------------------------------------------------------

// `layers` layers of 64 x 64, the hardware's rate, link and latency; only products and sums count.
struct Replicas {
  int layers, rows, gpus;
  std::string hardware;
  double flops, bandwidth, latency;

  static Picoseconds ps(double seconds) { return std::llround(seconds * 1e12); }
  static int64_t layer_bytes() { return (64 * 64 + 64) * sizeof(real); }

  Run with_buckets(int of_layers) const {
    std::string hidden = "64";
    for (int l = 2; l < layers; ++l) hidden += ",64";
    return {"02_data_parallel", hardware, gpus,
            "--hidden " + hidden + " --classes 64 --batch " + std::to_string(rows * gpus) +
                " --steps 1 --bucket-bytes " +
                std::to_string(of_layers == layers ? 0 : of_layers * layer_bytes())};
  }
  Picoseconds sum(double bytes) const {
    const double p = gpus;
    return gpus == 1 ? 0 : ps(2 * (p - 1) * latency) + ps(2 * (p - 1) / p * bytes / bandwidth);
  }
  Picoseconds layer() const { return ps(2.0 * rows * 64 * 64 / flops); }
  Picoseconds forward() const { return layers * layer(); }
  Picoseconds backward() const { return (2 * layers - 1) * layer(); }
  // Chapter 02's: c_i = max(ready_i, c_(i-1)) + what bucket i takes.
  Picoseconds step(int of_layers) const {
    Picoseconds now = forward(), end = 0;
    int waiting = 0;
    for (int l = layers - 1; l >= 0; --l) {
      now += layer() * (l > 0 ? 2 : 1);
      if (++waiting < of_layers && l > 0) continue;
      end = std::max(now, end) + sum(double(waiting) * layer_bytes());
      waiting = 0;
    }
    return std::max(now, end);
  }
};

const std::string& ring() {
  static const std::string text = [] {
    const char* const link = "ideal,link_latency=1e-6,link_bandwidth=100e9";
    const double S = 2.0 * Replicas::layer_bytes();
    std::vector<Row> rows = {{"n", "bytes 2(n-1)/n S", "program", "time", "program",
                              "bus bandwidth without latency", "program"}};
    for (const int n : {2, 4, 8}) {
      const Replicas with{2, 8, n, link, 1e12, 100e9, 1e-6};
      const Replicas bare{2, 8, n, "ideal,link_bandwidth=100e9", 1e12, 100e9, 0};
      const Replicas free{2, 8, n, "ideal", 1e12, INFINITY, 0};
      const Ran a = run(with.with_buckets(2)), b = run(bare.with_buckets(2)),
                c = run(free.with_buckets(2));
      a.takes(with.step(2));
      b.takes(bare.step(2));
      c.takes(free.step(2));
      REQUIRE(a.bytes() == 2.0 * (n - 1) / n * S);
      const double busbw = S / (b.seconds() - c.seconds()) * 2 * (n - 1) / n;
      REQUIRE(busbw == Approx(100e9).epsilon(1e-5));
      rows.push_back({std::to_string(n), whole(2.0 * (n - 1) / n * S), whole(a.bytes()),
                      microseconds(with.sum(S)),
                      microseconds(std::llround((a.seconds() - c.seconds()) * 1e12)), "100 GB/s",
                      formatted("%.0f GB/s", busbw * 1e-9)});
    }
    return R"(## Ring all-reduce

nccl-tests, PERFORMANCE.md; Horovod, arXiv 1802.05799.

Each of n ranks sends 2(n-1)/n S bytes in 2(n-1) steps: t = 2(n-1) latency + 2(n-1)/n S/B. Bus
bandwidth is S/t times 2(n-1)/n: what a link carries, whatever n. S = )" +
           whole(S) +
           R"( bytes, B = 100 GB/s, 1 us a step; the program's time is what an update takes more than
with free links.

)" + table(rows) +
           R"(No gap: the formula is the model of the virtual clock. On real links large messages
see about 80 % of B.

Seen in: nccl-tests' own page.

)" + Replicas{2, 8, 8, link, 1e12, 100e9, 1e-6}.with_buckets(2).command();
  }();
  return text;
}

const std::string& ddp() {
  static const std::string text = [] {
    const Replicas r{16,   32,   32,  "ideal,node_gpus=32,link_bandwidth=64e9,link_latency=2e-9",
                     1e12, 64e9, 2e-9};
    const Picoseconds alone = r.step(16);
    std::vector<Row> rows = {
        {"layers a bucket", "buckets", "step by formula", "program", "gain against one bucket"}};
    double best = 0, first = 0, last = 0;
    for (const int k : {1, 2, 3, 4, 6, 8, 16}) {
      const Ran ran = run(r.with_buckets(k));
      ran.takes(r.step(k));
      const double gain = 1 - ran.seconds() * 1e12 / alone;
      best = std::max(best, last = gain);
      if (k == 1) first = gain;
      rows.push_back({std::to_string(k), std::to_string((15 + k) / k), microseconds(r.step(k)),
                      microseconds(std::llround(ran.seconds() * 1e12)), percent(gain)});
    }
    REQUIRE(best > first + 0.01);  // a U: the smallest bucket is not the best, nor the largest
    REQUIRE(std::abs(last) < 1e-6);
    const Picoseconds sums = r.sum(16.0 * r.layer_bytes());
    const double limit = double(std::min(r.backward(), sums)) / alone;
    return R"(## DDP's buckets

Li et al. 2020, arXiv 2006.15704.

Small buckets start early and pay the latency often, large ones start late: a U. 32 GPUs, 16 equal
layers; forward )" +
           microseconds(r.forward()) + ", backward " + microseconds(r.backward()) +
           ", one sum of everything " + microseconds(sums) + R"(.

)" + table(rows) +
           table(
               {heading,
                {"overlap's gain, at best",
                 "min(backward, sum)/step without = " + percent(limit) + " at most", percent(best),
                 "38.0 % (ResNet-50), 35.2 % (BERT), NCCL",
                 "what can be gained is what communication and backward have in common; here they "
                 "are about equal, which is the best case, and the last bucket never hides"}}) +
           R"(The paper's 38.0 % is nearly the limit of 2/5 that any network has with a backward
twice as long as its forward and sums as long as the backward. PyTorch's own buckets are 25 MB, the
first 1 MiB, chosen for links whose latency is worth far more bytes than here; `--bucket-bytes` is
16384 by default for networks of 100 kB.

Seen in: one note that quotes section 5.1 (that it was on 32 GPUs is recalled); PyTorch's
documentation.

)" + r.with_buckets(2).command();
  }();
  return text;
}

const std::string& horovod() {
  static const std::string text = [] {
    const char* const machine = "ideal,fp32=2.3e9,node_gpus=4,net_bandwidth=3.125e9";
    std::vector<Row> rows = {
        {"model", "GPUs", "step by formula", "program", "efficiency", "paper", "gap"}};
    std::string command;
    for (const int samples : {1, 2}) {
      double alone = 0;
      for (const int gpus : {1, 8, 64, 512}) {
        const Replicas r{8, samples, gpus, machine, 2.3e9, 3.125e9, 0};
        const Ran ran = run(r.with_buckets(1));
        ran.takes(r.step(1));
        if (gpus == 1) alone = ran.seconds();
        const double efficiency = alone / ran.seconds(), paper = samples == 1 ? 0.68 : 0.90;
        rows.push_back({samples == 1 ? "communication-bound" : "compute-bound",
                        std::to_string(gpus), microseconds(r.step(1)),
                        microseconds(std::llround(ran.seconds() * 1e12)), percent(efficiency),
                        gpus < 512     ? ""
                        : samples == 1 ? "68 % (VGG-16), chosen"
                                       : "90 % (Inception V3, ResNet-101)",
                        gpus < 512 ? "" : gap(efficiency, paper, 0.05)});
        command = r.with_buckets(1).command();
      }
    }
    const Replicas late{8,     2,       512,   std::string(machine) + ",net_latency=2.7e-6",
                        2.3e9, 3.125e9, 2.7e-6};
    const Ran slow = run(late.with_buckets(1));
    slow.takes(late.step(1));
    const Replicas one{8, 2, 1, machine, 2.3e9, 3.125e9, 0};
    return R"(## Data parallelism on 512 GPUs (Horovod's benchmarks)

128 servers of 4 GPUs, 25 Gb/s, as there; weak scaling, a bucket a layer. What decides is arithmetic
for each byte of gradient. An MLP does the same for each parameter and sample, so the compute-bound
model is the same eight layers of 64 x 64 with two samples a GPU instead of one. Such small layers
need a slow GPU to stand for large ones on a fast one: the rate, 2.3 GFLOP/s, is **chosen** so that
the first model comes near VGG-16; the second then follows.

)" + table(rows) +
           R"(- The first model's sums take longer than its backward, whatever the buckets. With
  twice the arithmetic they hide behind it, and what is left to see is the last bucket.
- From 64 to 512 GPUs nearly nothing changes, for 2(p-1)/p is nearly 2 already. That holds for a
  ring without latency. With NCCL's 2.7 us a step over a network, 1,022 steps take 2.76 ms for every
  bucket:
   )" + seconds_text(slow.seconds()) +
           " an update, " + percent(double(one.step(1)) / late.step(1)) +
           R"( efficiency. So NCCL has trees for many ranks, and gradients are large where there are
many.

Seen in: Horovod's README. Our two models are not theirs.

)" + command;
  }();
  return text;
}

// ---- the learning rate -----------------------------------------------------------------------

// One update, or a few, of logistic regression from the same start. In this process, for the
// batches differ where the program's own order could not.
std::vector<double> trained(const Dataset& samples, int batch, int64_t steps, double lr, int base,
                            LrScale rule) {
  Config config;
  config.hidden = {};
  config.batch = batch, config.steps = steps, config.lr = lr, config.base_batch = base;
  config.lr_scale = rule, config.momentum = 0, config.shuffle = false, config.quiet = true;
  Result result;
  REQUIRE(train_yardstick(config, samples, 0, result) == 0);
  return {result.weights.begin(), result.weights.end()};
}

Dataset part(const Dataset& all, const std::vector<int>& order, size_t first, size_t n) {
  Dataset some;
  some.features = all.features;
  for (size_t i = first; i < first + n; ++i) {
    some.labels.push_back(all.labels[order[i]]);
    const auto pixels = all.pixels.begin() + int64_t{order[i]} * all.features;
    some.pixels.insert(some.pixels.end(), pixels, pixels + all.features);
  }
  return some;
}

double distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

const std::string& large_batches() {
  static const std::string text = [] {
    const Dataset data = load("data/digits", 10).train;
    const int k = 4, base = 8, groups = static_cast<int>(data.size()) / (k * base);
    std::vector<std::vector<double>> small, linear, root;
    for (uint64_t shuffle = 0; shuffle < 2; ++shuffle) {
      std::vector<int> order(data.size());
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(),
                [&](int a, int b) { return hash(shuffle, 1, a) < hash(shuffle, 1, b); });
      for (int g = 0; g < groups; ++g) {
        const Dataset large = part(data, order, g * k * base, k * base);
        linear.push_back(trained(large, k * base, 1, 0.1, base, LrScale::linear));
        root.push_back(trained(large, k * base, 1, 0.1, base, LrScale::sqrt));
        for (int i = 0; i < k; ++i)
          small.push_back(trained(part(data, order, (g * k + i) * base, base), base, 1, 0.1, base,
                                  LrScale::none));
      }
    }
    const auto variance = [](const std::vector<std::vector<double>>& steps) {
      std::vector<double> mean(steps[0].size());
      for (const auto& step : steps)
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += step[i] / steps.size();
      double sum = 0;
      for (const auto& step : steps) sum += std::pow(distance(step, mean), 2);
      return sum / (steps.size() - 1);
    };
    const double by_linear = variance(linear) / variance(small);
    const double by_root = variance(root) / variance(small);
    // 92 large batches of which each step's direction varies in a few dozen ways: a few per cent.
    REQUIRE(by_linear == Approx(k).epsilon(0.1));
    REQUIRE(by_root == Approx(1).epsilon(0.1));

    std::vector<int> order(data.size());
    std::iota(order.begin(), order.end(), 0);
    const Dataset first = part(data, order, 0, 256);
    const auto apart = [&](double lr) {
      return distance(trained(first, 64, 4, lr, 64, LrScale::none),
                      trained(first, 256, 1, lr, 64, LrScale::linear));
    };
    std::vector<Row> rows = {
        {"lr of the small steps", "distance / lr^2", "distance against that of twice the lr"}};
    double before = 0;
    for (const double lr : {0.08, 0.04, 0.02, 0.01}) {
      const double d = apart(lr);
      if (before > 0) REQUIRE(before / d == Approx(4).epsilon(0.15));
      rows.push_back({formatted("%g", lr), formatted("%.1f", d / lr / lr),
                      before > 0 ? formatted("1/%.1f", before / d) : ""});
      before = d;
    }
    return R"(## Learning rates for large batches

Goyal et al. 2017, arXiv 1706.02677; Krizhevsky 2014, arXiv 1404.5997.

The variance of one update over batches, batch times k = 4, against the base batch of 8: logistic
regression on the digits, the same start, 92 large and 368 small batches from two orders.

)" +
           table({heading,
                  {"sqrt rule", "lr^2/batch: k/k = 1", formatted("%.2f", by_root),
                   "kept the same (page 5)", "92 batches are a sample, off by a few per cent"},
                  {"linear rule", "k^2/k = k = 4", formatted("%.2f", by_linear),
                   "lr times k (section 2.1); not about variance", "as above"}}) +
           R"(Linear's reason is another: k small steps go where one large step goes, as long as the
gradient hardly changes on the way. Four steps of 64 samples against one of 256 with lr times 4:
they differ by O(lr^2), so half the rate is a quarter of the distance.

)" + table(rows) +
           R"(Half the rate takes a quarter, more nearly so the smaller it is: the next term is
lr^3. The paper's errors of ResNet-50 (23.60 % with 256, 23.74 % with 8192 and a warm-up) are of a
network and data that this course does not have; [chapter 02](../02_data_parallel) has its own table
of the three rules.

Seen in: Goyal's abstract; one note for sections 2 and 5; many files for Krizhevsky's sentence.

)" +
           Run{"02_data_parallel", "h100", 4,
               "--hidden none --batch 256 --base-batch 64 --lr-scale linear --lr 0.02 --momentum 0 "
               "--no-shuffle --steps 1",
               true}
               .command();
  }();
  return text;
}

// ---- old gradients ---------------------------------------------------------------------------

struct Pushed {
  int rank;
  int64_t age;
};
std::vector<Pushed> pushes(const Ran& ran) {
  std::istringstream list(ran.text("push order (rank:batch:age)"));
  std::vector<Pushed> all;
  for (std::string push; list >> push;)
    all.push_back({std::stoi(push), std::stoll(push.substr(push.rfind(':') + 1))});
  return all;
}

Run server(int workers, int steps, const std::string& more) {
  return {"03_async_ps", "ideal", workers + 1,
          "--hidden 8 --steps " + std::to_string(steps) + " " + more, true};
}

const std::string& stale() {
  static const std::string text = [] {
    struct Ages {
      double mean = 0;
      int64_t least = 1 << 20, most = 0;
    };
    const auto ages_of_thirty = [](const Run& r) {
      const std::vector<Pushed> all = pushes(run(r));
      Ages ages;
      for (size_t i = 60; i < all.size(); ++i) {  // after two rounds to fill
        ages.mean += double(all[i].age) / (all.size() - 60);
        ages.least = std::min(ages.least, all[i].age), ages.most = std::max(ages.most, all[i].age);
      }
      return ages;
    };
    // 1,498 samples are 214 batches of 7, or 187 of 8 and one of 2: whoever gets that one is early.
    const Run thirty = server(30, 600, "--mode async --batch 8");
    const Ages even = ages_of_thirty(server(30, 600, "--mode async --batch 7"));
    const Ages uneven = ages_of_thirty(thirty);
    REQUIRE(even.least == 29);
    REQUIRE(even.most == 29);
    REQUIRE(uneven.mean == Approx(29).epsilon(0.02));
    REQUIRE(uneven.most <= 60);
    const std::vector<Pushed> slow =
        pushes(run(server(4, 130, "--mode async --batch 7 --slow-worker 2")));
    int64_t of_slow = 0;
    for (const Pushed& push : slow)
      if (push.rank == 2) of_slow = push.age;
    REQUIRE(of_slow == 4 * (4 - 1));
    std::vector<Row> rows = {
        heading,
        {"age, 30 workers, equal batches", "W - 1 = 29", std::to_string(even.least) + ", every one",
         "mean about n = 30 (n-softsync, n = lambda)",
         "a worker's own update is not before itself: the other 29 are"},
        {"age, one short batch an epoch", "mean W - 1 = 29",
         "mean " + formatted("%.1f", uneven.mean) + ", " + std::to_string(uneven.least) + " to " +
             std::to_string(uneven.most),
         "0 to 2n = 60, above with probability < 1e-4 (measured)",
         "who gets the short batch is early from then on, and the others' order changes"},
        {"age of a worker K = 4 times slower, W = 4", "K(W-1) = 12", std::to_string(of_slow), "",
         ""}};
    for (const int S : {1, 2, 4}) {
      std::vector<int64_t> clock(4);
      int64_t after = 0, start = 0;
      for (const Pushed& push : pushes(run(server(
               4, 130, "--mode ssp --batch 7 --slow-worker 2 --staleness " + std::to_string(S))))) {
        const int64_t slowest = *std::min_element(clock.begin(), clock.end());
        start = std::max(start, clock[push.rank - 1] - slowest);
        after =
            std::max(after, ++clock[push.rank - 1] - *std::min_element(clock.begin(), clock.end()));
      }
      REQUIRE(after == S);
      REQUIRE(start == S - 1);
      rows.push_back(
          {"SSP, `--staleness " + std::to_string(S) + "`: clocks ahead at a push, after it",
           std::to_string(S - 1) + ", " + std::to_string(S),
           std::to_string(start) + ", " + std::to_string(after),
           "a read at most s = " + std::to_string(S - 1) + " ahead",
           "none: s is counted when a clock begins, --staleness when it ends, one later"});
    }
    return R"(## Old gradients: SSP and async

Ho et al. 2013 (SSP); Zhang et al. 2015, arXiv 1511.05950 (staleness-aware SGD).

An age is the number of updates between a gradient's parameters and its own update.

)" + table(rows) +
           R"(`--staleness 0` and `1` are both s = 0: all go in step. `--staleness-aware` divides
the rate by the age as Zhang et al. do (lr0/tau, lr0 at tau = 0). Downpour SGD (Dean et al. 2012)
fetches and pushes every step in its experiments; that one worker then is plain SGD, bit for bit, is
this course's test and no claim of that paper.

Seen in: the text of Zhang et al.; course notes and Multiverso's server for SSP.

)" + thirty.command();
  }();
  return text;
}

// ---- 16 bits ---------------------------------------------------------------------------------

const std::string& mixed() {
  static const std::string text = [] {
    const auto rounded = [](float x) { return __half2float(__float2half(x)); };
    REQUIRE(rounded(0x1p-24f) == 0x1p-24f);
    REQUIRE(rounded(0x1p-25f) == 0);
    REQUIRE(rounded(std::nextafter(0x1p-25f, 1.0f)) == 0x1p-24f);
    REQUIRE(rounded(65504) == 65504);
    REQUIRE(rounded(std::nextafter(65520.0f, 0.0f)) == 65504);
    REQUIRE(std::isinf(rounded(65520)));
    REQUIRE(rounded(1 + 0x1p-11f) == 1);
    REQUIRE(rounded(1 + 0x1.8p-11f) == 1 + 0x1p-10f);
    int lost = 1;  // the least power of two by which an update may be smaller and is lost
    while (rounded(1 + 1.0f / lost) != 1) lost *= 2;
    REQUIRE(lost == 2048);
    const Run scaled{"08_accum_amp", "h100", 1, "--pp 1 --steps 1 --precision fp16", true};
    const Ran ran = run(scaled);
    REQUIRE(ran.number("loss scale") == 65536);
    REQUIRE(ran.number("scale-window") == 2000);
    const auto exact = [&](float x) { return formatted("%.9g", rounded(x)); };
    return R"(## Mixed precision and loss scalers

Micikevicius et al. 2017, arXiv 1710.03740.

The program's are the conversions that chapter 08's kernels do.

)" +
           table({heading,
                  {"smallest positive fp16", "2^-24 = " + formatted("%.9g", 0x1p-24),
                   exact(0x1p-24f), "2^-24", "none"},
                  {"2^-25 becomes", "halfway to 0, even: 0", exact(0x1p-25f), "0: below 2^-24",
                   "anything more than 2^-25 still rounds up to 2^-24"},
                  {"largest fp16", "(2 - 2^-10) 2^15 = 65504", exact(65504), "65504",
                   "up to 65520 rounds down to it, from there on it is infinite"},
                  {"1 + 2^-11 becomes", "halfway to 1 + 2^-10, even: 1", exact(1 + 0x1p-11f),
                   "lost: 10 bits of mantissa", "none"},
                  {"an update is lost if the weight is larger by", "2^11 = 2048",
                   std::to_string(lost), "at least 2048", "none"},
                  {"a dynamic scale starts at", "", ran.text("loss scale"),
                   "65536 (PyTorch, DeepSpeed), 2^15 (TensorFlow)", "PyTorch's choice"},
                  {"it doubles after", "", ran.text("scale-window") + " clean updates",
                   "2000 (PyTorch, TensorFlow), 1000 (DeepSpeed)", "PyTorch's choice"}}) +
           R"(That about 5 % of the weight gradients are below 2^-24 is of a Mandarin speech model;
SSD's 67 % of zeros is of activation gradients. Neither is a property of the format.

Seen in: notes by others that agree on section 3; the documentation of the three scalers; and
computed again.

)" + scaled.command();
  }();
  return text;
}

const std::string& page() {
  static const std::string text = wrapped(
      R"(# What papers print, and what the programs do

Written by `make papers` from runs on the virtual clock, and held by `tests/test_papers.cc`: every
"program" equals its formula, to the picosecond and the byte where the clock is exact, and this page
is what the runs say. A paper's number is that of its text, its abstract, its code, or of notes by
others that name the table; each section says which, under "Seen in". What could not be checked is
not here. Each section ends with the command of one of its runs; the other rows differ in the
options that the row names.

`ideal` hardware does one FLOP in a picosecond and everything else in no time, so formulas that
leave out launches and latencies can come out exactly. What it gives up is said where it matters.

)" + gpipe() +
      "\n" + pipedream() + "\n" + interleaved() + "\n" + megatron() + "\n" + ring() + "\n" + ddp() +
      "\n" + horovod() + "\n" + large_batches() + "\n" + stale() + "\n" + mixed() + R"(
## Not here

Rematerialisation, weight stashing and 2BW, zero-bubble schedules, ZeRO and activation checkpointing
are not in this course. Accuracies of ResNets and speeds of real clusters (Megatron's 76 % of linear
on 512 V100, 52 % of peak on 3072 A100) cannot come out of a model of the clock and a small network.
)");
  return text;
}

}  // namespace

TEST_CASE("papers: GPipe's makespan, bubble and speed-up table") { gpipe(); }
TEST_CASE("papers: PipeDream's micro-batches in flight") { pipedream(); }
TEST_CASE("papers: interleaving's makespan and bytes") { interleaved(); }
TEST_CASE("papers: Megatron's two all-reduces a pair") { megatron(); }
TEST_CASE("papers: ring all-reduce's bytes and time") { ring(); }
TEST_CASE("papers: DDP's gain over the bucket size is a U") { ddp(); }
TEST_CASE("papers: data parallelism on 512 GPUs") { horovod(); }
TEST_CASE("papers: the linear and the sqrt rule") { large_batches(); }
TEST_CASE("papers: the ages of SSP and of async") { stale(); }
TEST_CASE("papers: fp16's edges and the loss scale") { mixed(); }

TEST_CASE("papers: docs/papers.md is what the runs say") {
  if (const char* file = std::getenv("PAPERS"))
    write_file(file, page());
  else
    REQUIRE(contents("docs/papers.md") == page());
}
