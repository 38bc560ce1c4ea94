// Chapter 06: the schedules are the tables that common/pipeline.cuh draws; all of them and one
// stage alone give the same bits; the clock, the stashes and the messages are the formulas'.
#include <map>
#include <tuple>

#include "../06_pipeline/train.cuh"
#include "stages.h"

namespace {

constexpr const char* name = "06_pipeline";
constexpr Schedule schedules[] = {Schedule::gpipe, Schedule::one_f_one_b, Schedule::interleaved};

ch06::Settings settings_of(std::vector<int> hidden, int classes, int batch, int64_t steps,
                           int gpus, int m, Schedule schedule, int chunks = 0) {
  auto settings = small_settings<ch06::Settings>(std::move(hidden), classes, batch, steps);
  settings.gpus = gpus;
  settings.microbatches = m;
  settings.schedule = schedule;
  settings.chunks = schedule == Schedule::interleaved ? chunks : 0;
  return settings;
}

Result run(const ch06::Settings& settings, const Dataset& data) {
  return run_ranks_here(ch06::train, settings, data);
}

const std::vector<int> odd_widths = {7, 9, 6, 8, 5, 7, 9};  // eight layers with data and classes

// "rank 0   F0  .   B0'": the works in order and, by their place, when.
struct Drawn {
  std::vector<std::pair<Work, int>> works;  // and the column
};
std::vector<Drawn> drawn(const std::vector<std::string>& lines) {
  std::vector<Drawn> rows;
  for (const std::string& line : lines) {
    rows.emplace_back();
    for (size_t at = 0; at < line.size(); at += 4) {
      if (line[at] == '.') continue;
      const std::string cell = line.substr(at, 4);
      const int chunk = static_cast<int>(std::count(cell.begin(), cell.end(), '\''));
      const Work work{cell[0] == 'F', chunk, cell[1] - '0'};
      rows.back().works.push_back({work, static_cast<int>(at) / 4});
    }
  }
  return rows;
}

struct Picture {
  Schedule schedule;
  int m, v;
  std::vector<std::string> lines;
};
// The pictures of common/pipeline.cuh.
const Picture pictures[] = {
    {Schedule::gpipe, 4, 1,
     {"F0  F1  F2  F3  .   .   .   .   B0  B1  B2  B3",
      ".   F0  F1  F2  F3  .   .   B0  B1  B2  B3",
      ".   .   F0  F1  F2  F3  B0  B1  B2  B3"}},
    {Schedule::one_f_one_b, 4, 1,
     {"F0  F1  F2  .   .   B0  F3  B1  .   B2  .   B3",
      ".   F0  F1  .   B0  F2  B1  F3  B2  .   B3",
      ".   .   F0  B0  F1  B1  F2  B2  F3  B3"}},
    {Schedule::interleaved, 4, 2,
     {"F0  F1  F0' F1' F2  B0' F3  B1' F2' B0  F3' B1  .   B2' .   B3' B2  B3",
      ".   F0  F1  F0' B0' F1' B1' F2  B0  F3  B1  F2' B2' F3' B3' B2  B3"}}};

// When each work ends if rank r's work takes forward or backward[r] and no message takes time;
// empty if ranks wait in a circle.
std::vector<std::vector<int64_t>> simulate(const std::vector<std::vector<Work>>& tables, int v,
                                           int64_t forward, int64_t backward) {
  const int p = static_cast<int>(tables.size());
  std::map<std::tuple<bool, int, int>, int64_t> done;  // forward?, stage, micro
  std::vector<std::vector<int64_t>> ends(p);
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < p; ++r)
      while (ends[r].size() < tables[r].size()) {
        const Work& w = tables[r][ends[r].size()];
        const int stage = w.chunk * p + r;
        int64_t ready = 0;
        std::tuple<bool, int, int> needs{w.forward, stage + (w.forward ? -1 : 1), w.micro};
        if (!w.forward && stage == p * v - 1) needs = {true, stage, w.micro};
        if (!w.forward || stage > 0) {
          if (!done.count(needs)) break;
          ready = done[needs];
        }
        const int64_t end = std::max(ready, ends[r].empty() ? 0 : ends[r].back()) +
                            (w.forward ? forward : backward);
        done[{w.forward, stage, w.micro}] = end;
        ends[r].push_back(end);
        moved = true;
      }
  }
  for (int r = 0; r < p; ++r)
    if (ends[r].size() < tables[r].size()) return {};
  return ends;
}

std::vector<std::vector<Work>> tables_of(Schedule schedule, int p, int m, int v) {
  std::vector<std::vector<Work>> tables;
  for (int r = 0; r < p; ++r) tables.push_back(schedule_table(schedule, r, p, m, v));
  return tables;
}

}  // namespace

// ---- the schedule --------------------------------------------------------------------------

TEST_CASE("06: the tables are those drawn in common/pipeline.cuh") {
  const std::string source = contents("common/pipeline.cuh");
  for (const auto& [schedule, m, v, lines] : pictures) {
    const int p = static_cast<int>(lines.size());
    const auto tables = tables_of(schedule, p, m, v);
    const auto ends = simulate(tables, v, 1, 1);
    for (int r = 0; r < p; ++r) {
      INFO("schedule " << int(schedule) << ", rank " << r);
      REQUIRE(source.find("//   rank " + std::to_string(r) + "   " + lines[r] + "\n") !=
              std::string::npos);
      const Drawn row = drawn(lines)[r];
      REQUIRE(row.works.size() == tables[r].size());
      for (size_t i = 0; i < row.works.size(); ++i) {
        REQUIRE(row.works[i].first == tables[r][i]);
        REQUIRE(row.works[i].second == ends[r][i] - 1);
      }
    }
  }
}

TEST_CASE("06: any table has every forward and backward once and in order, and comes to its end") {
  for (const Schedule schedule : schedules)
    for (int p = 1; p <= 8; ++p)
      for (const int m : {1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32})
        for (int v = 1; v <= (schedule == Schedule::interleaved && p > 1 ? 4 : 1); ++v) {
          INFO("schedule " << int(schedule) << ", " << p << " ranks, " << m << " micro-batches, "
                           << v << " chunks");
          const auto tables = tables_of(schedule, p, m, v);
          REQUIRE(!simulate(tables, v, 2, 3).empty());
          for (int r = 0; r < p; ++r) {
            REQUIRE(static_cast<int>(tables[r].size()) == 2 * m * v);
            for (int c = 0; c < v; ++c) {
              int forwards = 0, backwards = 0, most = 0;
              for (const Work& w : tables[r]) {
                if (w.chunk != c) continue;
                REQUIRE(w.micro == (w.forward ? forwards++ : backwards++));
                REQUIRE(backwards <= forwards);
                most = std::max(most, forwards - backwards);
              }
              REQUIRE(forwards == m);
              REQUIRE(backwards == m);
              if (schedule == Schedule::gpipe) REQUIRE(most == m);
              if (schedule == Schedule::one_f_one_b) REQUIRE(most == std::min(m, p - r));
              REQUIRE(most_in_flight(tables[r], c) == most);
            }
            // Neighbours send and receive in one order: what leaves a rank is what the next
            // expects, chunk by chunk.
            std::vector<std::pair<int, int>> sent, expected;
            const int next = (r + 1) % p, last = p * v - 1;
            for (const bool forward : {true, false}) {
              sent.clear(), expected.clear();
              for (const Work& w : tables[forward ? r : next])
                if (const int s = w.chunk * p + (forward ? r : next); forward ? s < last : s > 0)
                  sent.push_back({forward ? s + 1 : s - 1, w.micro * 2 + w.forward});
              for (const Work& w : tables[forward ? next : r])
                if (const int s = w.chunk * p + (forward ? next : r); forward ? s > 0 : s < last)
                  expected.push_back({s, w.micro * 2 + w.forward});
              std::erase_if(sent, [&](auto& x) { return (x.second & 1) != forward; });
              std::erase_if(expected, [&](auto& x) { return (x.second & 1) != forward; });
              if (p > 1) REQUIRE(sent == expected);
            }
          }
        }
}

// ---- equal ---------------------------------------------------------------------------------

// Micro-batches sum a gradient in another order than one product over the whole batch: a few eps
// of each sum's magnitude an update, and updates add up: chapter.cuh's `rounding`. Under 1e-12 in
// double. Between schedules and numbers of stages nothing differs: the same products, added up in
// the order of the micro-batches.
TEST_CASE("06: every schedule on any number of ranks has one stage's bits and is chapter 01") {
  const Dataset data = uneven_data(21, 5, 3);  // the last batch of 8 is 5, of 10 it is 1
  for (const int batch : {8, 10})
    for (const int m : {1, 2, 3, 5, 8}) {
      auto settings = settings_of(odd_widths, 3, batch, 10, 1, m, Schedule::gpipe);
      const Result one = run(settings, data), want = yardstick(settings, data);
      REQUIRE(rounding(settings, 50) < (sizeof(real) == 8 ? 1e-12 : 1));
      require_equal(settings, data, one, want, m == 1 ? 0 : rounding(settings, 10));
      for (const Schedule schedule : schedules)
        for (int p = 1; p <= 8; ++p) {
          if (schedule == Schedule::interleaved && p > 4) continue;  // two layers a rank at least
          settings.schedule = schedule;
          settings.gpus = p;
          INFO("batch " << batch << ", " << m << " micro-batches, schedule " << int(schedule)
                        << ", " << p << " ranks");
          require_equal(settings, data, run(settings, data), one, 0);
        }
    }
}

TEST_CASE("06: as many chunks as there are layers, also where micro-batches are no multiple") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const int m : {1, 2, 3, 4, 5, 7}) {
    auto settings = settings_of(odd_widths, 3, 8, 7, 1, m, Schedule::interleaved);
    const Result one = run(settings, data);
    for (const auto& [p, v] : {std::pair{2, 1}, {2, 2}, {2, 3}, {2, 4}, {3, 2}, {4, 2}}) {
      settings.gpus = p;
      settings.chunks = v;
      INFO(m << " micro-batches, " << p << " ranks, " << v << " chunks");
      require_equal(settings, data, run(settings, data), one, 0);
    }
  }
}

TEST_CASE("06: fifty updates are chapter 01's, whatever the momentum") {
  const Dataset data = uneven_data(10, 5, 3);
  for (const double momentum : {0.0, 0.9})
    for (const int batch : {4, 6, 10})
      for (const int p : {2, 3}) {
        auto settings = settings_of({7, 6}, 3, batch, 50, p, 4, Schedule::one_f_one_b);
        settings.momentum = momentum;
        settings.lr = 0.1;
        require_equal(settings, data, run(settings, data), yardstick(settings, data),
                      rounding(settings, 50));
      }
}

TEST_CASE("06: one update is as long as chapter 01's for any number of micro-batches") {
  const Dataset data = uneven_data(12, 5, 3);
  std::vector<real> start;
  for (const int p : {1, 2})
    for (const int m : {1, 2, 3, 4, 5, 6, 12})
      for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b}) {
        const auto settings = settings_of({7}, 3, 12, 1, p, m, schedule);
        const Result got = run(settings, data), want = yardstick(settings, data);
        initial_parameters(network(settings, 5), settings.seed, start);
        double moved = 0, should = 0;
        for (size_t i = 0; i < start.size(); ++i) {
          moved += std::abs(double(got.weights[i]) - start[i]);
          should += std::abs(double(want.weights[i]) - start[i]);
        }
        REQUIRE(should > 0.01);
        REQUIRE(moved / should == Approx(1.0).epsilon(1e-5));
        REQUIRE(got.losses[0] == Approx(want.losses[0]).epsilon(1e-6));
      }
}

// Micro-batch i has the one label i: a micro-batch with a neighbour's labels has a far other loss.
TEST_CASE("06: a micro-batch keeps its labels and its size on the way through all stages") {
  for (const int samples : {8, 10, 11}) {
    Dataset data = uneven_data(samples, 5, 4);
    const int m = 4;
    for (int k = 0; k < m; ++k)
      for (int64_t i = share(samples, k, m).first; i < share(samples, k, m).last; ++i)
        data.labels[i] = k;
    for (const Schedule schedule : schedules)
      for (const int p : {1, 2, 4}) {
        auto settings = settings_of(odd_widths, 4, samples, 3, p, m, schedule);
        settings.shuffle = false;
        INFO(samples << " samples, schedule " << int(schedule) << ", " << p << " ranks");
        require_equal(settings, data, run(settings, data), yardstick(settings, data),
                      rounding(settings, 3));
      }
  }
}

TEST_CASE("06: random delays change neither a bit nor a time", "[order]") {
  const Dataset data = uneven_data(21, 5, 3);
  for (const Schedule schedule : schedules) {
    const auto settings = settings_of({7, 9, 6, 8, 5}, 3, 8, 6, 3, 5, schedule);
    const Result want = run(settings, data);
    REQUIRE(want.step_seconds > 0);
    for (int seed = 1; seed <= 10; ++seed) {
      const Variable delays("VIRTUAL_GPU_JITTER", std::to_string(seed));
      const Result got = run(settings, data);
      REQUIRE(same(got, want));
      REQUIRE(got.step_seconds == want.step_seconds);
    }
  }
}

TEST_CASE("06: first sends that hold up the host until they are received cannot block each other") {
  const Variable strict("VIRTUAL_GPU_STRICT", "1");
  const Dataset data = uneven_data(10, 5, 3);
  for (const Schedule schedule : schedules)
    for (const int p : {2, 3, 4})
      for (const int m : {1, 2, 3, 4, 5}) {
        const auto settings = settings_of(odd_widths, 3, 6, 3, p, m, schedule);
        require_equal(settings, data, run(settings, data), yardstick(settings, data),
                      rounding(settings, 3));
      }
}

// ---- the clock -----------------------------------------------------------------------------

namespace {

// Equal layers of 8 x 8. A micro-batch's forward through one takes f; its backward 2f, but for
// layer 0, which has no input gradient to compute: f.
constexpr Picoseconds f_of(int64_t rows) { return 2 * rows * 8 * 8; }

// The time between the beginnings of two updates on rank 0, which both begins and ends them.
Picoseconds step_time(int m, int layers_on_rank_0) {
  const auto gemms = operations(0, Kind::gemm);
  const size_t each = static_cast<size_t>(m) * (3 * layers_on_rank_0 - 1);
  REQUIRE(gemms.size() == 4 * each);  // the warm-up's and three
  REQUIRE(gemms[3 * each].start - gemms[2 * each].start ==
          gemms[2 * each].start - gemms[each].start);
  return gemms[3 * each].start - gemms[2 * each].start;
}

}  // namespace

// With n layers a stage, tF = n f and tB = 2 n f. Stage 0's backward is f shorter, and as it is
// the last of an update's way, the update ends that much sooner; with one stage each micro-batch
// does.
TEST_CASE("06: a step takes (m+p-1)(tF+tB), in GPipe and in 1F1B, less what stage 0 leaves out") {
  const Dataset data = uneven_data(64, 8, 8);
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b})
    for (int p = 1; p <= 8; ++p)
      for (const int m : {1, 2, 3, 4, 7, 8, 16, 32}) {
        const int n = p <= 3 ? 2 : 1;
        const Hardware machine("ideal");
        const auto settings =
            settings_of(std::vector<int>(n * p - 1, 8), 8, 2 * m, 3, p, m, schedule);
        const Result result = run(settings, data);
        const Picoseconds f = f_of(2), tF = n * f, tB = 2 * n * f;
        const Picoseconds step = (m + p - 1) * (tF + tB) - (p == 1 ? m : 1) * f;
        INFO("schedule " << int(schedule) << ", " << p << " ranks, " << m << " micro-batches");
        REQUIRE(step_time(m, n) == step);
        REQUIRE(result.step_seconds == Approx(step * 1e-12).epsilon(1e-6));
        // The bubble is the same on all: p-1 of m+p-1 times tF+tB, less f at the very end.
        for (int r = 1; r < p; ++r) {
          const Picoseconds busy = total(operations(r, Kind::gemm)) / 4;
          REQUIRE(busy == m * (tF + tB));
          REQUIRE(step + f - busy == (p - 1) * (tF + tB));
        }
      }
}

TEST_CASE("06: interleaved, the bubble is v times smaller") {
  for (int p = 2; p <= 4; ++p)
    for (int v = 1; v <= 4; ++v)
      for (int m = p; m <= 32; m *= 2) {
        const Dataset data = uneven_data(2 * m, 8, 8);
        const Hardware machine("ideal");
        const auto settings = settings_of(std::vector<int>(p * v - 1, 8), 8, 2 * m, 3, p, m,
                                          Schedule::interleaved, v);
        run(settings, data);
        const Picoseconds f = f_of(2), tF = v * f, tB = 2 * v * f;
        INFO(p << " ranks, " << m << " micro-batches, " << v << " chunks");
        REQUIRE(step_time(m, v) == m * (tF + tB) + (p - 1) * (tF + tB) / v - f);
      }
}

// A message takes c. On the way there and back it is waited for once a border; all others pass
// while the stages compute.
TEST_CASE("06: transfers overlap with compute, so that each border costs two messages a step") {
  const Dataset data = uneven_data(64, 8, 8);
  for (int p = 2; p <= 8; p += 2)
    for (const int m : {1, 4, 16}) {
      const Hardware machine("ideal,link_latency=100e-12,link_bandwidth=2e12");
      const auto settings = settings_of(std::vector<int>(p - 1, 8), 8, 2 * m, 3, p, m,
                                        Schedule::gpipe);
      run(settings, data);
      const Picoseconds f = f_of(2), bytes = 2 * 8 * sizeof(real), c = 100 + bytes / 2;
      REQUIRE(c < f);
      // Before the next update can begin, rank 0 takes in the loss.
      const Picoseconds loss = 100 + static_cast<int64_t>(sizeof(real)) / 2;
      INFO(p << " ranks, " << m << " micro-batches");
      REQUIRE(step_time(m, 1) == (m + p - 1) * 3 * f - f + 2 * (p - 1) * c + loss);
    }
}

namespace {

// The operations on `device` of a call ("gemm", "ncclRecv") under a range ("F 3"), by start.
std::vector<Operation> calls(int device, const std::string& call, const std::string& range) {
  std::vector<Operation> found;
  for (const Operation& o : virtual_gpu::timeline())
    if (o.device == device && call == o.call && range == o.range) found.push_back(o);
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.start < b.start; });
  return found;
}

}  // namespace

// A slow stage before a fast one, or after it, with links that take time: wherever a wait is
// left out, something happens too soon here.
TEST_CASE("06: nothing is sent before it is computed, used before it is there, or overwritten") {
  const Dataset data = uneven_data(64, 40, 3);
  const int m = 8;
  for (const Schedule schedule : {Schedule::gpipe, Schedule::one_f_one_b})
    for (const auto& hidden : {std::vector<int>{40}, {4}})
      for (const bool slow_first : {true, false}) {
        const Hardware machine("ideal,link_latency=3e-9,link_bandwidth=1e12");
        Dataset shaped = data;
        if (!slow_first) shaped = uneven_data(64, 2, 40);
        const auto settings =
            settings_of(hidden, slow_first ? 3 : 40, 64, 3, 2, m, schedule);
        run(settings, shaped);
        const auto k_of = [](const std::string& way, int k) {
          return way + " " + std::to_string(k);
        };
        for (int t = 0; t < 4; ++t)
          for (int k = 0; k < m; ++k) {
            const std::string F = k_of("F", k), B = k_of("B", k);
            INFO("schedule " << int(schedule) << ", update " << t << ", micro-batch " << k);
            const auto f0 = calls(0, "gemm", F), b0 = calls(0, "gemm", B);
            const auto f1 = calls(1, "gemm", F), b1 = calls(1, "gemm", B);
            const auto fs = calls(0, "ncclSend", F), fr = calls(1, "ncclRecv", F);
            const auto bs = calls(1, "ncclSend", B), br = calls(0, "ncclRecv", B);
            REQUIRE((f0.size() == 4 && b0.size() == 4 && f1.size() == 4 && b1.size() == 8));
            REQUIRE((fs.size() == 4 && fr.size() == 4 && bs.size() == 4 && br.size() == 4));
            REQUIRE(fs[t].start >= f0[t].end);            // computed, then sent
            REQUIRE(f1[t].start >= fr[t].end);            // received, then used
            REQUIRE(bs[t].start >= b1[2 * t + 1].end);
            REQUIRE(b0[t].start >= br[t].end);
            // Gradients have two slots on either side.
            const int before = k < 2 ? m + k - 2 : k - 2, then = k < 2 ? t - 1 : t;
            if (then < 0) continue;
            REQUIRE(br[t].start >= calls(0, "gemm", k_of("B", before))[then].end);
            // b1's second product of a micro-batch writes what is sent.
            REQUIRE(b1[2 * t + 1].start >= calls(1, "ncclSend", k_of("B", before))[then].end);
          }
      }
}

// ---- memory and messages -------------------------------------------------------------------

TEST_CASE("06: activations of m micro-batches are kept in GPipe, of min(m, p-i) in 1F1B") {
  const Dataset data = uneven_data(64, 5, 3);
  for (const Schedule schedule : schedules)
    for (int p = 1; p <= 8; ++p)
      for (const int m : {1, 3, 8, 32}) {
        if (schedule == Schedule::interleaved && p > 4) continue;
        const int v = schedule == Schedule::interleaved && p > 1 ? 2 : 1;
        auto settings = settings_of(odd_widths, 3, 64, 2, p, m, schedule);
        const Shape shape = network(settings, 5);
        const auto stages = stage_layers(shape, p * v);
        const int64_t N = 64, b = (64 + m - 1) / m, T = 2, L = shape.layers();
        const auto results = all_results(ch06::train, settings, data);
        for (int i = 0; i < p; ++i) {
          INFO("schedule " << int(schedule) << ", stage " << i << " of " << p << ", m = " << m);
          int64_t numbers = 0, bytes = 0;
          for (int c = 0; c < v; ++c) {
            const auto [first, last] = stages[c * p + i];
            int64_t kept = schedule == Schedule::gpipe ? m : std::min(m, p - i);
            if (v > 1) kept = most_in_flight(schedule_table(schedule, i, p, m, v), c);
            numbers += 3 * (shape.weight_at(last) - shape.weight_at(first));  // w, g, v
            for (int64_t l = first; l <= last; ++l) numbers += kept * b * shape.width[l];
            // One more that comes in meanwhile; gradients of one micro-batch, of two where sent.
            if (first > 0 && kept < m) numbers += b * shape.width[first];
            for (int64_t l = std::max<int64_t>(first, 1); l <= last; ++l) {
              const bool border = l == first || (l == last && l < L);
              numbers += (border ? std::min(2, m) : 1) * b * shape.width[l];
            }
          }
          if (i == 0) bytes += N * 5;
          if (i == p - 1) bytes += 4 * N + 4 * b, numbers += b;
          if (i == 0 || i == p - 1) bytes += 4 * 64 * 2, numbers += T;
          REQUIRE(results[i].peak_memory == bytes + numbers * static_cast<int64_t>(sizeof(real)));
        }
      }
}

TEST_CASE("06: messages carry each border's activation and gradient once, and the loss") {
  const Dataset data = uneven_data(24, 5, 3);
  for (const Schedule schedule : schedules)
    for (int p = 1; p <= 4; ++p)
      for (const int m : {1, 3, 5}) {
        const Hardware machine("ideal");
        const auto settings = settings_of(odd_widths, 3, 8, 6, p, m, schedule);
        const int v = settings.chunks_on(p);
        const Shape shape = network(settings, 5);
        const auto stages = stage_layers(shape, p * v);
        const auto results = all_results(ch06::train, settings, data);
        for (int r = 0; r < p; ++r) {
          int64_t numbers = p > 1 && r == p - 1, messages = numbers;
          for (int s = r; s < p * v; s += p) {
            if (s < p * v - 1) numbers += 8 * shape.width[stages[s].last], messages += m;
            if (s > 0) numbers += 8 * shape.width[stages[s].first], messages += m;
          }
          REQUIRE(results[r].bytes_sent_per_step == double(numbers * sizeof(real)));
          int64_t sends = 0;
          for (const Operation& o : operations(r, Kind::transfer))
            sends += std::string(o.call) == "ncclSend" && std::string(o.range) != "";
          REQUIRE(sends == 7 * messages);  // six updates and the warm-up's
          REQUIRE(virtual_gpu::counters(r).collectives == 0);
        }
      }
}

TEST_CASE("06: nothing is allocated in a step") {
  const Dataset data = uneven_data(21, 5, 3);
  int64_t allocations[2][3];
  for (const int more : {0, 1}) {
    const Hardware machine("ideal");
    run(settings_of({7, 6, 8}, 3, 8, more ? 9 : 2, 3, 4, Schedule::one_f_one_b), data);
    for (int r = 0; r < 3; ++r) allocations[more][r] = virtual_gpu::counters(r).allocations;
  }
  for (int r = 0; r < 3; ++r) REQUIRE(allocations[0][r] == allocations[1][r]);
}

TEST_CASE("06: every resource is given back, each on its own GPU, and a second run is the first") {
  virtual_gpu::reset();
  const Dataset data = uneven_data(21, 5, 3);
  for (const Schedule schedule : schedules) {
    const auto settings = settings_of({7, 6, 8, 5, 9}, 3, 8, 12, 3, 4, schedule);
    REQUIRE(same(run(settings, data), run(settings, data)));
  }
  require_all_given_back(3);
}

// ---- failure and wrong input ---------------------------------------------------------------

TEST_CASE("06: whichever call fails on one rank, the run ends and says so") {
  if (sizeof(real) == 8) return;  // the same calls as in float
  const Dataset data = uneven_data(10, 5, 3);
  require_no_wrong_result(ch06::train, settings_of({7, 6}, 3, 6, 2, 3, 3, Schedule::one_f_one_b),
                          data, 1, 900, 23);
}

TEST_CASE("06: a rank that leaves or throws ends the run within seconds") {
  const Dataset data = uneven_data(10, 5, 3);
  const auto settings = settings_of({7, 6, 8}, 3, 6, 50, 3, 2, Schedule::one_f_one_b);
  for (const bool throws : {false, true}) {
    const Hardware machine("ideal");
    const auto start = std::chrono::steady_clock::now();
    ncclUniqueId id = {};
    OK(ncclGetUniqueId(&id));
    const int status = run_threads(0, 3, {0, 1, 2}, id, [&](Rank& rank) {
      if (rank.rank == 1 && throws) throw Error("gave up");
      if (rank.rank != 1) ch06::train(settings, data, rank);
    });
    REQUIRE(status == 1);
    REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  }
}

TEST_CASE("06: a failing rank ends the program with its number and the cause", "[program]") {
  const auto start = std::chrono::steady_clock::now();
  const Outcome out = run_command("VIRTUAL_GPU_FAIL=900:2 " + program(name) +
                                  " --gpus 3 --steps 200 --quiet");
  INFO(out.err);
  REQUIRE(out.status == 1);
  REQUIRE(out.err.substr(0, 8) == "rank 2: ");
  REQUIRE(std::chrono::steady_clock::now() - start < std::chrono::seconds(15));
}

TEST_CASE("06: what cannot be is refused by name, with what would be right", "[program]") {
  require_refused(name, "--gpus 4", {"--gpus: 4 ", "the network has 3"});
  require_refused(name, "--gpus 3 --schedule interleaved", {"--chunks: 2 ", "has 3"});
  require_refused(name, "--gpus 2 --schedule interleaved --chunks 3 --hidden 8,8,8",
                  {"--chunks: 3 ", "has 4"});
  require_refused(name, "--batch 8 --microbatches 9", {"--microbatches: 9 ", "8 samples"});
  require_refused(name, "--microbatches 0", {"--microbatches: \"0\" given"});
  require_refused(name, "--microbatches 2x", {"--microbatches: \"2x\" given"});
  require_refused(name, "--chunks 0", {"--chunks: \"0\" given"});
  require_refused(name, "--chunks 2 --gpus 2", {"--chunks: 2 ", "--schedule interleaved"});
  require_refused(name, "--schedule pipe", {"--schedule: \"pipe\"", "gpipe|1f1b|interleaved"});
  const Outcome help = run_chapter(name, "--help");
  REQUIRE(help.status == 0);
  for (const char* option : {"--microbatches M", "--schedule gpipe|1f1b|interleaved", "--chunks V"})
    REQUIRE(help.out.find(option) != std::string::npos);
}

TEST_CASE("06: the program compares itself with chapter 01, learns and reports", "[program]") {
  const Outcome out = run_chapter(name, "--gpus 3 --batch 50 --epochs 15 --check");
  INFO(out.out << out.err);
  REQUIRE(out.status == 0);
  REQUIRE(out.out.find(": pass") != std::string::npos);
  const size_t at = out.out.find("test accuracy");
  REQUIRE(at != std::string::npos);
  REQUIRE(std::stod(out.out.substr(at + 13)) > 95);
}
