// The programs' face: command lines through the built program of chapter 01.
#include "../common/output.h"

#include <regex>

#include "catch.h"
#include "program.h"

namespace {

Outcome run(const std::string& arguments) { return run_chapter("01_single_gpu", arguments); }

// Exit status 2, nothing on stdout, and one line on stderr with all of these words.
void refused(const std::string& arguments, const std::vector<std::string>& words) {
  const Outcome o = run(arguments);
  INFO(arguments << "\n" << o.err);
  CHECK(o.status == 2);
  CHECK(o.out.empty());
  CHECK(std::count(o.err.begin(), o.err.end(), '\n') == 1);
  for (const std::string& word : words) {
    INFO(word);
    CHECK(o.err.find(word) != std::string::npos);
  }
}

std::vector<double> losses_of(const std::string& report) {
  std::smatch found;
  std::vector<double> all;
  if (!std::regex_search(report, found, std::regex("\"losses\": \\[([^\\]]*)\\]"))) return all;
  std::istringstream text(found[1]);
  for (std::string item; std::getline(text, item, ',');) all.push_back(std::stod(item));
  return all;
}

}  // namespace

TEST_CASE("a whole number is taken whole or refused with option, text and what is right") {
  for (const char* text : {"1e3", "2x", "", "-4", "0", "99999999999999", " 5", "0x10", "5.0", "+5"})
    refused(std::string("--batch '") + text + "'",
            {"--batch", '"' + std::string(text) + '"', "a whole number from 1 to 2147483647"});
  refused("--batch=1e3", {"--batch", "\"1e3\""});
  refused("--gpus 0", {"--gpus", "\"0\""});
  refused("--steps -1", {"--steps", "\"-1\"", "from 0"});
  refused("--epochs 0", {"--epochs", "\"0\""});
  refused("--classes 0", {"--classes", "\"0\""});
  refused("--seed 18446744073709551616", {"--seed", "18446744073709551616"});
  refused("--warmup -2", {"--warmup", "\"-2\""});
  refused("--base-batch 0", {"--base-batch", "\"0\""});
}

TEST_CASE("a rate that is no number above 0 is refused") {
  for (const char* text : {"abc", "nan", "inf", "-1", "0", "1e999", "", "0.1x", "0,1"})
    refused(std::string("--lr '") + text + "'",
            {"--lr:", '"' + std::string(text) + '"', "a number above 0"});
  for (const char* text : {"1", "-0.1", "nan"})
    refused(std::string("--momentum ") + text, {"--momentum", text, "from 0 to below 1"});
}

TEST_CASE("words and widths are refused with the list of what is right") {
  refused("--lr-scale square", {"--lr-scale", "\"square\"", "none|sqrt|linear"});
  refused("--lr-schedule ''", {"--lr-schedule", "constant|cosine"});
  for (const char* text : {"128,", ",128", "128,,64", "0", "128,-1", "a", "", "99999999999"})
    refused(std::string("--hidden '") + text + "'", {"--hidden", "commas"});
  refused("--data ''", {"--data", "a path"});
}

TEST_CASE("unknown, shortened, valueless and positional options are refused by name") {
  refused("--bogus", {"--bogus", "no such option"});
  refused("--bogus=3", {"--bogus"});
  refused("--step 3", {"--step:", "--steps would be right"});
  refused("--batch", {"--batch", "needs a value"});
  refused("--lr 0.1 --steps", {"--steps", "needs a value"});
  refused("--batch --steps 3", {"--batch", "\"--steps\""});
  refused("--quiet=yes", {"--quiet", "takes no value"});
  refused("64", {"\"64\"", "not an option"});
  refused("--batch 32 64", {"\"64\""});
  refused("-b 32", {"-b"});
  refused("-- 32", {"\"32\""});
}

TEST_CASE("what this chapter, the machine or the data cannot do is refused before training") {
  refused("--gpus 2", {"--gpus", "2 given"});
  refused("--data nowhere", {"nowhere/train-images-idx3-ubyte", "no such file"});
  refused("--classes 5", {"label", "--classes 5"});
  refused("--epochs 2000000000", {"--epochs 2000000000"});
  refused("--steps 2147483648", {"--steps 2147483648"});
  refused("--hidden 16777216,16777216", {"--hidden"});
  refused("--check --steps 0", {"--check", "--steps 0"});
  refused("--save /nowhere/w.safetensors", {"--save", "/nowhere/w.safetensors", "No such file"});
  refused("--report /tmp", {"--report", "/tmp", "Is a directory"});
}

TEST_CASE("help lists the options in groups with their defaults") {
  const Outcome o = run("--help");
  CHECK(o.status == 0);
  CHECK(o.err.empty());
  for (const char* words : {"training:", "--batch B", "[64]", "--hidden", "[128,128]", "example:"})
    CHECK(o.out.find(words) != std::string::npos);
  CHECK(run("--batch 3 --help").out == o.out);  // the defaults, whatever else was given
}

TEST_CASE("of a repeated option the last holds") {
  const TemporaryFolder folder;
  const std::string report = folder.path("r.json");
  REQUIRE(run("--steps 2 --steps 3 --quiet --report " + report).status == 0);
  CHECK(losses_of(contents(report)).size() == 3);
}

TEST_CASE("the defaults learn the digits to over 95 percent") {
  const Outcome o = run("");
  CHECK(o.status == 0);
  CHECK(o.err.empty());
  std::smatch found;
  REQUIRE(std::regex_search(o.out, found, std::regex("test accuracy +([0-9.]+) %")));
  CHECK(std::stod(found[1]) > 95);
  CHECK(o.out.find('\r') == std::string::npos);  // plain lines where stdout is no terminal
  CHECK(std::regex_search(o.out, std::regex("step +48/480  loss [0-9.]+ +[0-9]+ samples/s\n")));
}

TEST_CASE("quiet prints nothing, and with check one line") {
  CHECK(run("--quiet --steps 5").out.empty());
  const Outcome o = run("--quiet --steps 5 --check");
  CHECK(o.status == 0);
  CHECK(o.out.find("pass\n") == o.out.size() - 5);
  CHECK(std::count(o.out.begin(), o.out.end(), '\n') == 1);
}

TEST_CASE("a rate that makes the loss infinite fails the run") {
  const Outcome o = run("--quiet --lr 1e30 --steps 20");
  CHECK(o.status == 1);
  CHECK(o.err.find("not finite") != std::string::npos);
}

TEST_CASE("the report holds settings, every update's loss, and the table") {
  const TemporaryFolder folder;
  const std::string path = folder.path("r.json");
  REQUIRE(run("--quiet --steps 4 --seed 7 --check --report " + path).status == 0);
  const std::string report = contents(path);
  for (const char* words :
       {"\"chapter\": \"01_single_gpu\"", "\"seed\": 7", "\"hidden\": \"128,128\"",
        "\"check\": \"pass\"", "\"difference\": 0", "\"step_seconds\": "})
    CHECK(report.find(words) != std::string::npos);
  const std::vector<double> losses = losses_of(report);
  REQUIRE(losses.size() == 4);
  CHECK(losses[0] == Approx(std::log(10)).epsilon(0.3));
  CHECK(losses[3] != losses[0]);
  const Outcome python = run_command("python3 -m json.tool " + path);
  if (python.status != 127) CHECK(python.status == 0);
}

TEST_CASE("saved at step 0: the initial weights, each under its name") {
  const TemporaryFolder folder;
  const std::string path = folder.path("w.safetensors");
  const Outcome o = run("--quiet --steps 0 --seed 3 --hidden 5 --save " + path);
  REQUIRE(o.status == 0);
  const std::string file = contents(path);
  const Shape shape{{64, 5, 10}};
  uint64_t header = 0;
  REQUIRE(file.size() > 8);
  std::memcpy(&header, file.data(), 8);
  CHECK(header % 8 == 0);
  REQUIRE(file.size() == 8 + header + shape.parameters() * sizeof(real));
  const std::string text = file.substr(8, header), type = sizeof(real) == 8 ? "F64" : "F32";
  const auto bytes = [](int n) { return std::to_string(n * sizeof(real)); };
  for (const std::string& entry :
       {"\"layers.0.weight\":{\"dtype\":\"" + type + "\",\"shape\":[5,64],\"data_offsets\":[0," +
            bytes(320) + "]}",
        "\"layers.0.bias\":{\"dtype\":\"" + type + "\",\"shape\":[5],\"data_offsets\":[" +
            bytes(320) + "," + bytes(325) + "]}",
        "\"layers.1.weight\":{\"dtype\":\"" + type + "\",\"shape\":[10,5],\"data_offsets\":[" +
            bytes(325) + "," + bytes(375) + "]}"}) {
    INFO(text << "\n" << entry);
    CHECK(text.find(entry) != std::string::npos);
  }
  std::vector<real> initial, saved(shape.parameters());
  initial_parameters(shape, 3, initial);
  std::memcpy(saved.data(), &file[8 + header], saved.size() * sizeof(real));
  CHECK(saved == initial);
  CHECK(std::distance(std::filesystem::directory_iterator(folder.name()), {}) == 1);
}

TEST_CASE("JSON text is escaped, and what is no number is null") {
  CHECK(json(std::string("a\"b\\c\n")) == "\"a\\\"b\\\\c\\u000a\"");
  CHECK(json(NAN) == "null");
  CHECK(json(0.1) == "0.1");
  CHECK(json(std::vector<double>{1, INFINITY}) == "[1, null]");
}

TEST_CASE("accuracy on the host: a known network, and the first of equal logits") {
  const Shape shape{{2, 2}};
  Dataset data;
  data.features = 2;
  data.pixels = {255, 0, 0, 255, 51, 51};
  data.labels = {0, 1, 0};
  CHECK(count_correct(shape, {1, 0, 0, 1, 0, 0}, data) == 3);
  data.labels = {1, 0, 1};
  CHECK(count_correct(shape, {1, 0, 0, 1, 0, 0}, data) == 0);
  CHECK(count_correct(shape, {1, 0, 0, 1, 0, real(0.5)}, data) == 1);
  std::vector<double> a(19), b(19);
  for (int i = 0; i < 19; ++i) a[i] = i + 1, b[i] = i % 3;
  CHECK(dot(a.data(), b.data(), 19) == std::inner_product(a.begin(), a.end(), b.begin(), 0.0));
}
