// The timeline's three forms: what they show of operations made up here, and what a program
// leaves behind when it is asked for them.
#include <cuda_runtime.h>
#include <nvtx3/nvToolsExt.h>
#include <sys/stat.h>
#include <virtual_gpu.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "../virtual_gpu/src/picture.h"
#include "catch.h"
#include "program.h"

using virtual_gpu::draw_svg;
using virtual_gpu::draw_text;
using virtual_gpu::Kind;
using virtual_gpu::Operation;

namespace {

const char* kept(const std::string& text) {
  static std::set<std::string> all;
  return all.insert(text).first->c_str();
}

Operation operation(int device, int stream, Kind kind, const std::string& range, double start,
                    double end, const std::string& step = "") {  // in microseconds
  const auto at = [](double t) { return static_cast<virtual_gpu::Picoseconds>(t * 1e6); };
  return {device, stream, kind, "call", kept(range), at(start), at(start), at(end), 0, kept(step)};
}

// Two stages and two micro-batches, as 06_pipeline names them.
std::vector<Operation> small_pipeline() {
  const std::string step = "step 4";
  return {operation(0, 0, Kind::gemm, "F 0", 5, 12, step),
          operation(0, 0, Kind::kernel, "F 0", 12, 15, step),
          operation(0, 0, Kind::gemm, "F 1", 15, 25, step),
          operation(0, 0, Kind::gemm, "B 0", 37, 50, step),
          operation(0, 0, Kind::gemm, "B 1", 50, 63, step),
          operation(0, 0, Kind::kernel, "update", 63, 65, step),
          operation(0, 1, Kind::transfer, "send F 0", 15, 16, step),
          operation(0, 1, Kind::transfer, "send F 1", 25, 26, step),
          operation(1, 0, Kind::copy, "load", 5, 6, step),
          operation(1, 0, Kind::gemm, "F 0", 16, 22, step),
          operation(1, 0, Kind::gemm, "B 0", 22, 36, step),
          operation(1, 0, Kind::gemm, "F 1", 36, 42, step),
          operation(1, 0, Kind::gemm, "B 1", 42, 49, step)};
}

// What one picture has at most: 8 stages, 32 micro-batches, one step of 1F1B's length.
std::vector<Operation> large_pipeline() {
  std::vector<Operation> all;
  for (int device = 0; device < 8; ++device) {
    for (int m = 0; m < 32; ++m) {
      const double start = 10 * device + 30 * m;
      const std::string number = std::to_string(m);
      all.push_back(operation(device, 0, Kind::gemm, "F " + number, start, start + 10, "step 0"));
      all.push_back(
          operation(device, 0, Kind::gemm, "B " + number, start + 10, start + 30, "step 0"));
    }
    for (int m = 0; m < 32; ++m)
      all.push_back(operation(device, 1, Kind::transfer, "send " + std::to_string(m),
                              10 * device + 30 * m + 10, 10 * device + 30 * m + 12, "step 0"));
  }
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

struct Element {  // of an SVG: its attributes, and its text
  std::map<std::string, std::string> attributes;
  std::string text;
  double number(const char* name) const { return std::stod(attributes.at(name)); }
};

std::vector<Element> elements(const std::string& svg, const std::string& tag) {
  const std::regex whole("<" + tag + "((?: [A-Za-z-]+='[^']*')*)/?>([^<]*)(?:<title>([^<]*))?");
  const std::regex attribute("([A-Za-z-]+)='([^']*)'");
  std::vector<Element> all;
  for (std::sregex_iterator i(svg.begin(), svg.end(), whole), end; i != end; ++i) {
    Element e{{}, (*i)[2].str() + (*i)[3].str()};
    const std::string inside = (*i)[1].str();
    for (std::sregex_iterator a(inside.begin(), inside.end(), attribute); a != end; ++a)
      e.attributes[(*a)[1].str()] = (*a)[2].str();
    all.push_back(e);
  }
  return all;
}

std::vector<Element> boxes(const std::string& svg, const std::string& fill = "") {
  std::vector<Element> all;
  for (const Element& e : elements(svg, "rect")) {
    const bool wanted = fill.empty() || e.attributes.at("fill") == fill;
    if (wanted && e.text.find(" us") != std::string::npos) all.push_back(e);
  }
  return all;
}

const char forward[] = "#9cc7ee", backward[] = "#1f5fa8";

// ---- a program that is asked for its timeline -------------------------------------------------

void nothing(int) {}

void launch(cudaStream_t stream, const char* range) {
  nvtxRangePushA(range);
  const cudaLaunchConfig_t config{1, 1, 0, stream, nullptr, 0};
  REQUIRE(cudaLaunchKernelEx(&config, nothing, 0) == cudaSuccess);
  nvtxRangePop();
}

std::string asked(const std::string& variables, const std::string& name = "small program") {
  const auto self = std::filesystem::read_symlink("/proc/self/exe").string();
  return "VIRTUAL_GPU=ideal,launch=1.234567e-6 " + variables + " '" + self + "' '" + name + "'";
}

}  // namespace

// Six steps on two GPUs, after a warm-up.
TEST_CASE("small program", "[.small-program]") {
  cudaStream_t streams[2];
  for (int i = 0; i < 2; ++i) {
    REQUIRE(cudaSetDevice(i) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking) == cudaSuccess);
  }
  nvtxRangePushA("warm-up");
  for (int t = -1; t < 6; ++t) {
    nvtxRangePushA(("step " + std::to_string(std::max(t, 0))).c_str());
    for (int i = 0; i < 2; ++i) {
      REQUIRE(cudaSetDevice(i) == cudaSuccess);
      launch(streams[i], "forward 0");
      launch(streams[i], "say \"hi\" & <go>");
      REQUIRE(cudaStreamSynchronize(streams[i]) == cudaSuccess);
    }
    nvtxRangePop();
    if (t < 0) nvtxRangePop();
  }
  for (const int i : {1, 0}) cudaStreamDestroy(streams[i]);  // the files are in GPUs' order
  std::puts("ran");
}

TEST_CASE("nothing on a GPU", "[.nothing]") {
  int count = 0;
  REQUIRE(cudaGetDeviceCount(&count) == cudaSuccess);
}

TEST_CASE("text timeline: rows, boxes, idle time, utilisation, axis, legend") {
  CHECK("\n" + draw_text(small_pipeline()) == R"(
GPU 0  compute F0--------F1--------............B0-----------B1-----------U-  80%
       comm    ..........S.........S.......................................
GPU 1  compute L..........F0----B0------------F1----B1-----................  55%
               0                   20                  40                  60 us
-compute =communication ~copy .idle; B: B F: F L: load S: send F U: update
)");
}

TEST_CASE("text timeline: 80 columns at most, whatever is in it") {
  std::vector<Operation> all = large_pipeline();
  for (int i = 0; i < 40; ++i)
    all.push_back(operation(100, 7, Kind::kernel, "a range with a long name " + std::to_string(i),
                            20 * i, 20 * i + 5));
  const std::vector<std::string> lines = lines_of(draw_text(all));
  CHECK(lines.size() > 17);
  for (const std::string& line : lines) CHECK(line.size() <= 80);
  const std::string axis = lines_of(draw_text({operation(0, 0, Kind::gemm, "x", 0, 1000)}))[1];
  CHECK(axis.size() == 80);
  CHECK(axis.substr(72) == " 1000 us");
}

TEST_CASE("boxes are phases: what touches under one range is one, a pause divides it") {
  const auto titles = [](const std::vector<Operation>& operations) {
    std::vector<std::string> all;
    for (const Element& e : boxes(draw_svg(operations))) all.push_back(e.text);
    return all;
  };
  using Titles = std::vector<std::string>;
  const Operation first = operation(0, 0, Kind::gemm, "forward 1", 0, 10);
  const auto with = [&](const Operation& o) { return titles({first, o}); };
  CHECK(with(operation(0, 0, Kind::kernel, "forward 1", 10, 20)) ==
        Titles{"forward 1: 0 to 20 us"});
  CHECK(with(operation(0, 0, Kind::kernel, "forward 1", 11, 20)) ==
        Titles{"forward 1: 0 to 10 us", "forward 1: 11 to 20 us"});
  CHECK(with(operation(0, 0, Kind::kernel, "forward 2", 10, 20)) ==
        Titles{"forward 1: 0 to 10 us", "forward 2: 10 to 20 us"});
  CHECK(with(operation(0, 0, Kind::copy, "forward 1", 10, 20)) ==
        Titles{"forward 1: 0 to 10 us", "forward 1: 10 to 20 us"});
  CHECK(with(operation(0, 1, Kind::gemm, "forward 1", 10, 20)) ==
        Titles{"forward 1: 0 to 10 us", "forward 1: 10 to 20 us"});
  CHECK(with(operation(0, 0, Kind::gemm, "forward 2", 10, 10)) == Titles{"forward 1: 0 to 10 us"});
  // Outside any range, or in that of the step alone, the call is the name.
  const char* step = kept("step 2");
  Operation bare = operation(0, 0, Kind::gemm, "", 10, 20);
  CHECK(with(bare) == Titles{"forward 1: 0 to 10 us", "call: 10 to 20 us"});
  bare.range = bare.step = step;
  CHECK(with(bare) == Titles{"forward 1: 0 to 10 us", "call: 10 to 20 us"});
}

TEST_CASE("a stream in which nothing takes time has no row, a GPU always has one") {
  const std::vector<Operation> all = {operation(0, 0, Kind::gemm, "x", 0, 10),
                                      operation(0, 1, Kind::transfer, "x", 5, 5),
                                      operation(1, 0, Kind::kernel, "x", 5, 5),
                                      operation(1, 1, Kind::transfer, "x", 5, 10),
                                      operation(2, 0, Kind::transfer, "x", 5, 5),
                                      operation(2, 1, Kind::transfer, "x", 5, 5)};
  const std::vector<std::string> lines = lines_of(draw_text(all));
  REQUIRE(lines.size() == 3 + 2);
  CHECK(lines[0].substr(0, 20) == "GPU 0  compute X----");
  CHECK(lines[1].substr(0, 20) == "GPU 1  comm    .....");
  CHECK(lines[2].substr(0, 5) == "GPU 2");
}

TEST_CASE("a stream that has messages of one direction only says of which") {
  const auto lines = lines_of(draw_text({operation(0, 1, Kind::transfer, "F 0", 0, 10),
                                         operation(0, 1, Kind::transfer, "F 1", 20, 30),
                                         operation(0, 2, Kind::transfer, "B 0", 10, 20),
                                         operation(0, 2, Kind::transfer, "F 2", 20, 30)}));
  CHECK(lines[0].substr(7, 8) == "comm F  ");
  CHECK(lines[1].substr(7, 8) == "comm    ");
}

TEST_CASE("SVG: kinds of work are told apart, by pattern too") {
  const std::string svg = draw_svg({operation(0, 0, Kind::gemm, "forward 0", 0, 10),
                                    operation(0, 0, Kind::kernel, "F 1'", 10, 20),
                                    operation(0, 0, Kind::kernel, "backward 0", 20, 30),
                                    operation(0, 0, Kind::gemm, "B 1", 30, 40),
                                    operation(0, 0, Kind::kernel, "Bias", 40, 50),
                                    operation(0, 1, Kind::collective, "all-reduce 0", 0, 10),
                                    operation(0, 1, Kind::transfer, "send 0", 10, 20),
                                    operation(0, 2, Kind::copy, "load", 0, 10)});
  std::vector<std::string> fills;
  for (const Element& e : boxes(svg)) fills.push_back(e.attributes.at("fill"));
  CHECK(fills == std::vector<std::string>{forward, forward, backward, backward, "#fff",
                                          "url(#lines)", "url(#lines)", "url(#dots)"});
  for (const Element& e : boxes(svg, "#fff")) CHECK(e.attributes.at("stroke") == "#000");
  std::set<std::string> words;
  for (const Element& e : elements(svg, "text")) words.insert(e.text);
  for (const char* word : {"forward", "backward", "other compute", "communication", "copy", "busy",
                           "GPU 0", "compute", "comm", "100 %", "forward 0", "all-reduce 0"}) {
    INFO(word);
    CHECK(words.count(word) == 1);
  }
}

TEST_CASE("SVG: a step begins where the first GPU begins it, and text is escaped") {
  const std::string svg = draw_svg({operation(0, 0, Kind::gemm, "x<y & z", 0, 10, "step 0"),
                                    operation(0, 0, Kind::gemm, "x", 60, 100, "step 1"),
                                    operation(1, 0, Kind::gemm, "x", 50, 60, "step 1")});
  double at = 0;
  for (const Element& e : elements(svg, "text"))
    if (e.text == "step 1") at = e.number("x");
  CHECK(at == Approx(128 + 802 * 0.5 + 4).margin(0.01));
  CHECK(svg.find(">x&lt;y &amp; z: 0 to 10 us<") != std::string::npos);
  double last = 0;
  int rows = 0;
  for (const Element& e : elements(svg, "rect")) {
    if (e.attributes.at("fill") != "#ececec") continue;
    ++rows;
    CHECK(e.number("y") > last);  // rows do not overlap
    last = e.number("y") + e.number("height");
  }
  CHECK(rows == 2);
}

TEST_CASE("SVG: steps that begin too close together to be named have no line either") {
  std::vector<Operation> all;
  for (int t = 0; t < 4; ++t)
    all.push_back(operation(t, 0, Kind::gemm, "x", 10 * t, 300, "step " + std::to_string(t)));
  std::vector<std::string> named;
  const std::string svg = draw_svg(all);
  for (const Element& e : elements(svg, "text"))
    if (e.text.rfind("step", 0) == 0) named.push_back(e.text);
  CHECK(named == std::vector<std::string>{"step 0", "step 3"});  // 27 units each, a name takes 62
  CHECK(elements(svg, "path").size() == 2 + 1 + 7);              // and the axis with its ticks
}

TEST_CASE("SVG: with a longer axis a picture is lower, and true to that axis") {
  const auto all = small_pipeline();  // 60 us
  const std::string alone = draw_svg(all), strip = draw_svg(all, 120'000'000);
  const std::vector<Element> wide = boxes(alone), narrow = boxes(strip);
  REQUIRE(wide.size() == narrow.size());
  for (size_t i = 0; i < wide.size(); ++i)
    CHECK(narrow[i].number("width") == Approx(wide[i].number("width") / 2).margin(0.011));
  for (const Element& e : elements(strip, "rect"))
    if (e.attributes.at("fill") == "#ececec") CHECK(e.number("width") == Approx(401));
  CHECK(elements(strip, "svg")[0].number("height") < elements(alone, "svg")[0].number("height"));
  CHECK(strip.find(">80 %<") != std::string::npos);  // of the 60
  CHECK(draw_svg(all, 1) != alone);
  CHECK(boxes(draw_svg(all, 1))[0].number("width") == wide[0].number("width"));
}

TEST_CASE("SVG: positions are times, utilisation is busy time over the picture's") {
  const std::string svg = draw_svg(small_pipeline());
  const double left = 128, width = 802, span = 60;
  const std::vector<Element> f = boxes(svg, forward);
  REQUIRE(f.size() == 4);
  CHECK(f[1].number("x") == Approx(left + width * 10 / span).margin(0.01));
  CHECK(f[1].number("width") == Approx(width * 10 / span).margin(0.01));
  CHECK(f[2].number("x") == Approx(left + width * 11 / span).margin(0.01));
  CHECK(f[2].number("y") > f[1].number("y") + f[1].number("height"));
  std::vector<std::string> percent;
  for (const Element& e : elements(svg, "text"))
    if (e.text.find('%') != std::string::npos) percent.push_back(e.text);
  CHECK(percent == std::vector<std::string>{"80 %", "55 %"});  // 48 and 33 of 60
  // Two streams that compute at once are one GPU at work.
  const std::string both = draw_svg({operation(0, 0, Kind::gemm, "a", 0, 60),
                                     operation(0, 0, Kind::gemm, "b", 90, 100),
                                     operation(0, 1, Kind::kernel, "c", 20, 70),
                                     operation(0, 1, Kind::kernel, "d", 91, 92)});
  CHECK(both.find(">80 %<") != std::string::npos);
}

TEST_CASE("SVG: with 8 GPUs and 32 micro-batches every box has its number, inside it") {
  const std::string svg = draw_svg(large_pipeline());
  std::vector<Element> all = boxes(svg, forward), texts = elements(svg, "text");
  for (const Element& e : boxes(svg, backward)) all.push_back(e);
  REQUIRE(all.size() == 8 * 64);
  int wrong = 0;
  for (const Element& box : all) {
    const double x = box.number("x"), y = box.number("y"), width = box.number("width");
    std::string inside;
    for (const Element& t : texts) {
      const double at = t.number("x"), size = t.number("font-size");
      if (at <= x || at >= x + width || t.number("y") <= y || t.number("y") >= y + 24) continue;
      inside += t.text;
      wrong += size < 8 || size * 0.6 * static_cast<double>(t.text.size()) > width + 0.5;
    }
    const std::string number = box.text.substr(2, box.text.find(':') - 2);
    wrong += inside != number && inside != box.text.substr(0, box.text.find(':'));
  }
  CHECK(wrong == 0);
  // A row of communication is too low for two digits one above the other.
  const std::string slim = draw_svg({operation(0, 0, Kind::gemm, "F 12", 0, 11),
                                     operation(0, 0, Kind::gemm, "x", 11, 1000),
                                     operation(0, 1, Kind::transfer, "send 34", 0, 11)});
  CHECK(slim.find(">2</text>") != std::string::npos);
  CHECK(slim.find(">4</text>") == std::string::npos);
  CHECK(elements(svg, "svg").at(0).number("width") == 1000);
  CHECK(elements(svg, "svg").at(0).number("height") < 700);
}

TEST_CASE("SVG: the axis has round times in a unit that fits") {
  const auto last_tick = [](double microseconds) {
    const std::string svg = draw_svg({operation(0, 0, Kind::gemm, "x", 3, 3 + microseconds)});
    return elements(svg, "text").back().text;
  };
  CHECK(last_tick(0.05) == "50 ns");
  CHECK(last_tick(1) == "1000 ns");
  CHECK(last_tick(60) == "60 \u00b5s");
  CHECK(last_tick(1150) == "1000 \u00b5s");
  CHECK(last_tick(2500) == "2.5 ms");
  CHECK(last_tick(70e6) == "70 s");
}

TEST_CASE("pictures of nothing are pictures") {
  CHECK(draw_svg({}).find("</svg>") != std::string::npos);
  CHECK(lines_of(draw_text({})).size() == 2);
  const std::string timeless = draw_svg({operation(0, 0, Kind::gemm, "x", 1, 1)});
  CHECK(timeless.find(">0 %<") != std::string::npos);
  CHECK(timeless.find("nan") == std::string::npos);
}

TEST_CASE("step numbers") {
  const auto number = [](const char* step) {
    return virtual_gpu::step_number(operation(0, 0, Kind::gemm, "", 0, 1, step));
  };
  CHECK(number("") == -1);
  CHECK(number("step 0") == 0);
  CHECK(number("step 123") == 123);
  CHECK(number("step one") == -1);
  CHECK(number("step 1 again") == -1);
  CHECK(number("step ") == -1);
}

TEST_CASE("recorded operations say where, what, when, and in which step") {
  virtual_gpu::reset();
  virtual_gpu::configure("ideal,launch=1e-6");
  virtual_gpu::record_timeline(true);
  cudaStream_t stream;
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  launch(stream, "before");
  nvtxRangePushA("step 7");
  launch(stream, "forward 2");
  nvtxRangePop();
  nvtxRangePushA("warm-up");
  nvtxRangePushA("step 8");
  launch(stream, "forward 3");
  nvtxRangePop();
  nvtxRangePop();
  cudaStreamDestroy(stream);
  virtual_gpu::record_timeline(false);
  const std::vector<Operation> all = virtual_gpu::timeline();
  REQUIRE(all.size() == 3);
  CHECK(all[1].device == 1);
  CHECK(all[1].stream == 0);
  CHECK(all[1].kind == Kind::kernel);
  CHECK(std::string(all[1].call) == "kernel");
  CHECK(std::string(all[1].range) == "forward 2");
  CHECK(std::string(all[0].step) == "");
  CHECK(std::string(all[1].step) == "step 7");
  CHECK(std::string(all[2].step) == "");  // a step within something else is none
  CHECK(all[1].start == 1'000'000);
  CHECK(all[1].end == 2'000'000);
  virtual_gpu::reset();
  CHECK(virtual_gpu::timeline().empty());
}

TEST_CASE("a trace has every operation, its times to the last digit, and is JSON") {
  const TemporaryFolder folder;
  const std::string path = folder.path("t.json");
  REQUIRE(run_command(asked("VIRTUAL_GPU_STEPS=1 VIRTUAL_GPU_TRACE=" + path)).status == 0);
  const auto event = [](const char* name, int device, const char* start, const char* issued) {
    return std::string(R"({"ph":"X","name":")") + name + R"(: kernel","cat":"kernel","pid":)" +
           std::to_string(device) + R"(,"tid":0,"ts":)" + start +
           R"(,"dur":1.234567,"args":{"bytes":0,"issued":)" + issued + R"(,"step":"step 1"}})";
  };
  const std::vector<std::string> want = {
      R"({"displayTimeUnit":"ns","traceEvents":[)",
      R"({"ph":"M","name":"process_name","pid":0,"args":{"name":"GPU 0"}},)",
      R"({"ph":"M","name":"thread_name","pid":0,"tid":0,"args":{"name":"stream 0"}},)",
      event("forward 0", 0, "9.876536", "9.876536") + ",",
      event(R"(say \"hi\" & <go>)", 0, "11.111103", "9.876536") + ",",
      R"({"ph":"M","name":"process_name","pid":1,"args":{"name":"GPU 1"}},)",
      R"({"ph":"M","name":"thread_name","pid":1,"tid":0,"args":{"name":"stream 0"}},)",
      event("forward 0", 1, "12.345670", "12.345670") + ",",
      event(R"(say \"hi\" & <go>)", 1, "13.580237", "12.345670"),
      "]}"};
  CHECK(lines_of(contents(path)) == want);
  REQUIRE(run_command(asked("VIRTUAL_GPU_TRACE=" + path)).status == 0);
  CHECK(lines_of(contents(path)).size() == 2 + 4 + 2 * 7 * 2);  // 7: the warm-up too
}

TEST_CASE("pictures show the last three steps, or those that are asked for") {
  const auto steps = [](const std::string& variables) {
    const TemporaryFolder folder;
    const Outcome run = run_command(asked(variables + " VIRTUAL_GPU_SVG=" + folder.path("t.svg")));
    CHECK(run.status == 0);
    std::vector<std::string> all;
    for (const Element& e : elements(contents(folder.path("t.svg")), "text"))
      if (e.text.rfind("step ", 0) == 0) all.push_back(e.text);
    return all;
  };
  using Steps = std::vector<std::string>;
  CHECK(steps("") == Steps{"step 3", "step 4", "step 5"});
  CHECK(steps("VIRTUAL_GPU_STEPS=2") == Steps{"step 2"});
  CHECK(steps("VIRTUAL_GPU_STEPS=1:2") == Steps{"step 1", "step 2"});
  CHECK(steps("VIRTUAL_GPU_STEPS=5:99") == Steps{"step 5"});
}

TEST_CASE("files are the same at every run, and text can go to standard output") {
  const TemporaryFolder folder;
  const auto run = [&](const std::string& name, const std::string& more) {
    const std::string base = folder.path(name);
    const Outcome outcome =
        run_command(asked("VIRTUAL_GPU_TRACE=" + base + ".json VIRTUAL_GPU_SVG=" + base +
                          ".svg VIRTUAL_GPU_TEXT=" + base + ".txt " + more));
    CHECK(outcome.status == 0);
    return contents(base + ".json") + contents(base + ".svg") + contents(base + ".txt");
  };
  const std::string first = run("a", "");
  CHECK(first.size() > 4000);
  CHECK(run("b", "VIRTUAL_GPU_JITTER=1") == first);
  CHECK(run("c", "VIRTUAL_GPU_JITTER=2") == first);
  const Outcome shown = run_command(asked("VIRTUAL_GPU_TEXT=-"));
  CHECK(shown.out.find(contents(folder.path("a.txt"))) != std::string::npos);
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder.name())) {
    (void)entry;
    ++files;
  }
  CHECK(files == 9);  // no draft is left
}

TEST_CASE("files that cannot be written are refused before anything runs") {
  const TemporaryFolder folder;
  const auto refused = [](const std::string& variables, const std::string& line) {
    const Outcome run = run_command(asked(variables));
    CHECK(run.status == 2);
    CHECK(run.err == line + "\n");
    CHECK(run.out.find("ran") == std::string::npos);
  };
  for (const std::string variable : {"VIRTUAL_GPU_TRACE", "VIRTUAL_GPU_SVG", "VIRTUAL_GPU_TEXT"}) {
    const std::string nowhere = variable + "=" + folder.path("no/such/t");
    refused(nowhere, nowhere + " cannot be written: No such file or directory");
    const std::string directory = variable + "=" + folder.name();
    refused(directory, directory + " cannot be written: it is no file");
  }
  // Not a device: a mistake here would replace it.
  REQUIRE(mkfifo(folder.path("pipe").c_str(), 0600) == 0);
  const std::string pipe = "VIRTUAL_GPU_SVG=" + folder.path("pipe");
  refused(pipe, pipe + " cannot be written: it is no file");
  for (const char* wrong : {"x", "-1", "0", "1us", "inf", "nan", "1e-10"}) {
    const std::string axis = std::string("VIRTUAL_GPU_AXIS=") + wrong;
    refused(axis, axis + " is not a time in seconds, as 2e-3");
  }
  for (const char* wrong : {"x", "-1", "3:", ":3", "3:2", "1:2:3", "1.5", "9999999999999999999"}) {
    const std::string steps = std::string("VIRTUAL_GPU_STEPS=") + wrong;
    refused(steps, steps + " is neither a step, as 3, nor a range, as 3:5");
  }
}

TEST_CASE("a step that never ran leaves no picture, and the old one as it was") {
  const TemporaryFolder folder;
  const std::string path = folder.path("t.svg");
  std::ofstream(path) << "old";
  const Outcome run = run_command(asked("VIRTUAL_GPU_STEPS=9 VIRTUAL_GPU_SVG=" + path));
  CHECK(run.status == 2);
  CHECK(run.err == "VIRTUAL_GPU_STEPS=9: no such step; the last is 5\n");
  CHECK(contents(path) == "old");
  CHECK(run_command(asked("VIRTUAL_GPU_SVG=" + path, "nothing on a GPU")).status == 0);
  CHECK(contents(path) == "old");
  CHECK(run_command(asked("VIRTUAL_GPU_SVG=" + path)).status == 0);
  CHECK(contents(path).find("</svg>") != std::string::npos);
}

// ---- make timeline-NN, make pictures, make run ----------------------------------------------

TEST_CASE("docs/pictures are what make pictures draws, byte for byte", "[program]") {
  const TemporaryFolder folder;
  const Outcome run = run_command("VIRTUAL_GPU=t4 tools/pictures.sh " + program("") + " " +
                                  folder.name());
  INFO(run.err);
  REQUIRE(run.status == 0);
  std::set<std::string> made, kept;
  for (const auto& entry : std::filesystem::directory_iterator(folder.name())) {
    const std::string name = entry.path().filename();
    made.insert(name);
    INFO(name);
    CHECK((contents(entry.path()) == contents("docs/pictures/" + name)));
  }
  for (const auto& entry : std::filesystem::directory_iterator("docs/pictures"))
    if (entry.path().filename().string().rfind("curves-", 0) != 0)
      kept.insert(entry.path().filename());
  CHECK(made == kept);
  CHECK(made.size() == 13);
}

TEST_CASE("a chapter's timeline fits a terminal, and options override its defaults",
          "[program]") {
  const auto timeline = [](const std::string& chapter, const std::string& options = "",
                           const std::string& variables = "") {
    return run_command(variables + " tools/timeline.sh " + program(chapter) + " " + options);
  };
  const auto gpus = [](const std::string& text) {
    int n = 0;
    for (const std::string& line : lines_of(text)) {
      CHECK(line.size() <= 80);
      n += line.rfind("GPU", 0) == 0;
    }
    return n;
  };
  const std::pair<const char*, int> chapters[] = {
      {"01_single_gpu", 1}, {"02_data_parallel", 4}, {"03_async_ps", 4}, {"04_layer_parallel", 4},
      {"05_tensor_parallel", 4}, {"06_pipeline", 4}, {"07_hybrid", 8}, {"08_accum_amp", 4}};
  for (const auto& [chapter, n] : chapters) {
    const Outcome run = timeline(chapter);
    INFO(chapter << run.err);
    CHECK(run.status == 0);
    CHECK(gpus(run.out) == n);
  }
  CHECK(gpus(timeline("06_pipeline", "--gpus 8 --microbatches 32").out) == 8);
  const std::string usual = timeline("06_pipeline").out;
  CHECK(gpus(timeline("06_pipeline", "--gpus 2").out) == 2);
  CHECK(timeline("06_pipeline", "--schedule gpipe").out != usual);
  CHECK(timeline("06_pipeline", "", "VIRTUAL_GPU=t4").out != usual);
  CHECK(timeline("06_pipeline", "", "VIRTUAL_GPU_STEPS=3").out != usual);
  for (const char* wrong : {"VIRTUAL_GPU=abacus", "VIRTUAL_GPU_SVG=/no/such/t.svg",
                            "VIRTUAL_GPU_MEMORY=64Q", "VIRTUAL_GPU_STEPS=x"}) {
    const Outcome run = timeline("06_pipeline", "", wrong);
    CHECK(run.status == 2);
    CHECK(run.out == "");
    CHECK(lines_of(run.err).size() == 1);
    CHECK(run.err.rfind(wrong, 0) == 0);
  }
  CHECK(timeline("06_pipelines").status == 2);
}

TEST_CASE("make run's table: speed-up over the first report, busy time where it is known") {
  const Outcome table = run_command(R"(printf '%s\n' \
    '{' '"chapter": "01_a",' '"settings": {"gpus": 1},' '"step_seconds": 6e-05,' '}' \
    'GPU 0  compute F---  100%' '       comm    ....' 'GPU 1  compute F---   50%' \
    '{' '"chapter": "02_b",' '"settings": {"gpus": 2},' '"step_seconds": 4e-05,' '}' | \
    awk -f tools/summary.awk)");
  const std::vector<std::string> lines = lines_of(table.out);
  REQUIRE(lines.size() == 3);
  CHECK(std::regex_search(lines[1], std::regex("01_a +1 .* 60.0 us +1.00 +- ")));
  CHECK(std::regex_search(lines[2], std::regex("02_b +2 .* 40.0 us +1.50 +75 % ")));
  for (const std::string& line : lines) CHECK(line.size() <= 105);
}
