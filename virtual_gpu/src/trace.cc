// The timeline: what every stream did and when, on the modelled clock, and its files.
//   VIRTUAL_GPU_TRACE=t.json  Chrome's trace format, for Perfetto
//   VIRTUAL_GPU_SVG=t.svg     a picture
//   VIRTUAL_GPU_TEXT=t.txt    the same as text; - is standard output
//   VIRTUAL_GPU_AXIS=2e-3     the SVG's axis has at least so many seconds; for some to be stacked
//   VIRTUAL_GPU_STEPS=3:5     only what ran in the NVTX ranges "step 3" to "step 5"
// Without the last, the trace has everything and the pictures the last three steps.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "picture.h"
#include "runtime.h"

namespace virtual_gpu {
namespace {

std::atomic<bool> record{false};

std::vector<Operation>& finished() {  // under Lock; lives for ever, as the runtime does
  static auto* all = new std::vector<Operation>;
  return *all;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < ' ') out += format("\\u%04x", c);
    else out += c;
  }
  return out + '"';
}

std::string microseconds(Picoseconds t) {  // all digits: a double would round
  return format("%lld.%06lld", static_cast<long long>(t / 1'000'000),
                static_cast<long long>(t % 1'000'000));
}

std::string chrome_trace(const std::vector<Operation>& operations) {
  static const char* const kinds[] = {"kernel", "gemm", "copy", "collective", "transfer"};
  std::string out = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  const Operation* previous = nullptr;
  for (const Operation& o : operations) {
    const std::string where = format("\"pid\":%d,\"tid\":%d", o.device, o.stream);
    out += previous ? ",\n" : "\n";
    if (!previous || previous->device != o.device)
      out += format("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,"
                    "\"args\":{\"name\":\"GPU %d\"}},\n", o.device, o.device);
    if (!previous || previous->device != o.device || previous->stream != o.stream)
      out += format("{\"ph\":\"M\",\"name\":\"thread_name\",%s,"
                    "\"args\":{\"name\":\"stream %d\"}},\n", where.c_str(), o.stream);
    const std::string name = *o.range ? std::string(o.range) + ": " + o.call : o.call;
    out += "{\"ph\":\"X\",\"name\":" + quoted(name) + ",\"cat\":\"" + kinds[int(o.kind)] + "\"," +
           where + ",\"ts\":" + microseconds(o.start) +
           ",\"dur\":" + microseconds(o.end - o.start) +
           ",\"args\":{\"bytes\":" + std::to_string(o.bytes) +
           ",\"issued\":" + microseconds(o.issue) + ",\"step\":" + quoted(o.step) + "}}";
    previous = &o;
  }
  return out + "\n]}\n";
}

// ---- files ---------------------------------------------------------------------------------

struct File {
  const char* variable;
  std::string path;
};
struct Files {
  File trace{"VIRTUAL_GPU_TRACE", ""}, svg{"VIRTUAL_GPU_SVG", ""}, text{"VIRTUAL_GPU_TEXT", ""};
  std::string steps;                  // as given
  int64_t first = -1, last = -1;      // of them; -1 where none are given
  Picoseconds axis = 0;
};
Files& files() {
  static auto* all = new Files;
  return *all;
}

[[noreturn]] void refuse(const File& file, const std::string& reason) {
  refuse_environment(std::string(file.variable) + "=" + file.path +
                     " cannot be written: " + reason);
}

// Whoever looks at the path sees the old file or the whole new one.
void write(const File& file, const std::string& contents) {
  const std::string draft = file.path + "." + std::to_string(getpid()) + ".tmp";
  std::FILE* out = std::fopen(draft.c_str(), "w");
  bool good = out && std::fwrite(contents.data(), 1, contents.size(), out) == contents.size();
  if (out) good &= std::fclose(out) == 0;
  if (good && std::rename(draft.c_str(), file.path.c_str()) == 0) return;
  const std::string reason = std::strerror(errno);
  std::remove(draft.c_str());
  refuse(file, reason);
}

void check_writable(const File& file) {
  struct stat was;
  if (stat(file.path.c_str(), &was) == 0 && !S_ISREG(was.st_mode)) refuse(file, "it is no file");
  const std::string draft = file.path + "." + std::to_string(getpid()) + ".tmp";
  std::FILE* out = std::fopen(draft.c_str(), "w");
  if (!out) refuse(file, std::strerror(errno));
  std::fclose(out);
  std::remove(draft.c_str());
}

void read_steps(Files& f) {
  f.steps = environment("VIRTUAL_GPU_STEPS");
  if (f.steps.empty()) return;
  const size_t colon = std::min(f.steps.find(':'), f.steps.size());
  const std::string first = f.steps.substr(0, colon);
  const std::string last = colon < f.steps.size() ? f.steps.substr(colon + 1) : first;
  const auto is_number = [](const std::string& text) {
    return !text.empty() && text.size() < 18 &&
           text.find_first_not_of("0123456789") == std::string::npos;
  };
  if (is_number(first) && is_number(last)) f.first = std::stoll(first), f.last = std::stoll(last);
  if (f.first < 0 || f.first > f.last)
    refuse_environment("VIRTUAL_GPU_STEPS=" + f.steps +
                       " is neither a step, as 3, nor a range, as 3:5");
}

void read_axis(Files& f) {
  const std::string text = environment("VIRTUAL_GPU_AXIS");
  char* end = nullptr;
  const double seconds = std::strtod(text.c_str(), &end);
  if (!text.empty() && (*end || !(seconds >= 1e-9 && seconds <= 1e6)))
    refuse_environment("VIRTUAL_GPU_AXIS=" + text + " is not a time in seconds, as 2e-3");
  f.axis = duration(seconds);
}

std::vector<Operation> only_steps(std::vector<Operation> all, int64_t first, int64_t last) {
  all.erase(std::remove_if(all.begin(), all.end(), [=](const Operation& o) {
    return step_number(o) < first || step_number(o) > last;
  }), all.end());
  return all;
}

void write_files() {
  const Files& f = files();
  std::vector<Operation> all = timeline();
  if (all.empty()) return;  // the program ended before its first operation
  int64_t latest = -1;
  for (const Operation& o : all) latest = std::max(latest, step_number(o));
  if (f.first >= 0) all = only_steps(std::move(all), f.first, f.last);
  if (all.empty())
    refuse_environment("VIRTUAL_GPU_STEPS=" + f.steps + ": no such step; " +
                       (latest < 0 ? "there are none" : "the last is " + std::to_string(latest)));
  if (!f.trace.path.empty()) write(f.trace, chrome_trace(all));
  if (f.first < 0 && latest >= 0)
    all = only_steps(std::move(all), std::max<int64_t>(0, latest - 2), latest);
  if (!f.svg.path.empty()) write(f.svg, draw_svg(all, f.axis));
  if (f.text.path == "-") std::fputs(draw_text(all).c_str(), stdout);
  else if (!f.text.path.empty()) write(f.text, draw_text(all));
}

}  // namespace

// Called while the runtime is being made: nothing here may ask for it.
void open_timeline_files() {
  Files& f = files();
  f = {};
  bool any = false;
  for (File* file : {&f.trace, &f.svg, &f.text}) {
    file->path = environment(file->variable);
    any |= !file->path.empty();
    if (!file->path.empty() && !(file == &f.text && file->path == "-")) check_writable(*file);
  }
  read_steps(f);
  read_axis(f);
  record_timeline(any);
  static bool at_exit = false;
  if (any && !std::exchange(at_exit, true)) std::atexit(write_files);
}

bool recording() { return record.load(std::memory_order_relaxed); }
void record_timeline(bool on) { record.store(on, std::memory_order_relaxed); }

void keep_operations(std::vector<Operation>&& more) {
  finished().insert(finished().end(), more.begin(), more.end());
}

void forget_operations() { finished().clear(); }

std::vector<Operation> timeline() {
  std::vector<Operation> all;
  {
    Lock lock;
    all = finished();
  }
  std::stable_sort(all.begin(), all.end(), [](const Operation& a, const Operation& b) {
    return std::tie(a.device, a.stream, a.start) < std::tie(b.device, b.stream, b.start);
  });
  return all;
}

}  // namespace virtual_gpu
