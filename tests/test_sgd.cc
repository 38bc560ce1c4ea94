// Settings, order, weights and rates against values worked out by hand, or by another program
// in another language from the same formulas.
#include "../common/sgd.h"

#include <set>

#include "catch.h"

namespace {

Config ten_in_fours() {  // 10 samples in batches of 4, 4 and 2
  Config config;
  config.batch = 4;
  config.epochs = 2;
  return config;
}

std::vector<double> rates(Config config, int64_t total) {
  config.steps = total;
  std::vector<double> all;
  for (const Update& u : updates(config, 10)) all.push_back(u.rate);
  return all;
}

bool near(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(a[i] - b[i]) < 1e-15)) return false;
  return true;
}

}  // namespace

TEST_CASE("mix is splitmix64") {
  CHECK(mix(0) == 0xe220a8397b1dcdaf);  // the generator's published first output for seed 0
  CHECK(mix(1) == 0x910a2dec89025cc1);
  CHECK(hash(1, 2, 3) == 0x6ae515c1c0ac7e37);
}

TEST_CASE("initial weights are the formula's") {
  CHECK(initial_weight(1, 0, 0, 64) == Approx(0.11850149990239724).epsilon(1e-15));
  CHECK(initial_weight(1, 0, 1, 64) == Approx(-0.04702319250187397).epsilon(1e-15));
  CHECK(initial_weight(1, 2, 1279, 128) == Approx(0.03193575143828924).epsilon(1e-15));
  CHECK(initial_weight(7, 1, 5, 3) == Approx(-0.5394770076752221).epsilon(1e-15));
}

TEST_CASE("initial parameters: each weight at its place, biases 0") {
  const Shape shape{{3, 2, 4}};
  CHECK(shape.layers() == 2);
  CHECK(shape.weight_at(0) == 0);
  CHECK(shape.bias_at(0) == 6);
  CHECK(shape.weight_at(1) == 8);
  CHECK(shape.bias_at(1) == 16);
  CHECK(shape.parameters() == 20);
  std::vector<real> flat(99, NAN);
  initial_parameters(shape, 7, flat);
  REQUIRE(flat.size() == 20);
  CHECK(flat[5] == static_cast<real>(initial_weight(7, 0, 5, 3)));
  CHECK(flat[8 + 5] == static_cast<real>(initial_weight(7, 1, 5, 2)));
  for (const int bias : {6, 7, 16, 17, 18, 19}) CHECK(flat[bias] == 0);
}

TEST_CASE("a layer of many weights is counted in 64 bits") {
  const Shape shape{{100000, 100000, 2}};
  CHECK(shape.parameters() == 10000100000 + 200002);
}

TEST_CASE("the network's widths are the data's, the hidden ones and the classes") {
  Config config;
  config.hidden = {5, 7};
  config.classes = 3;
  CHECK(network(config, 64).width == std::vector<int>{64, 5, 7, 3});
  config.hidden = {};
  CHECK(network(config, 64).width == std::vector<int>{64, 3});
}

TEST_CASE("the order of the samples is that of their hashes, another in each epoch") {
  Config config = ten_in_fours();
  std::vector<int32_t> right = {9, 4, 8, 0, 3, 2, 1, 5, 6, 7, 3, 6, 5, 1, 2, 8, 7, 9, 4, 0};
  CHECK(sample_order(config, 10) == right);
  config.seed = 2;
  config.epochs = 1;
  right = {5, 0, 2, 8, 7, 4, 1, 6, 3, 9};
  CHECK(sample_order(config, 10) == right);
  config.shuffle = false;
  right = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  CHECK(sample_order(config, 10) == right);
}

TEST_CASE("the order covers just the updates") {
  Config config = ten_in_fours();
  config.steps = 5;  // 4 + 4 + 2, then 4 + 4 of the second epoch
  CHECK(sample_order(config, 10).size() == 18);
  config.steps = 0;
  CHECK(sample_order(config, 10).empty());
  CHECK(updates(config, 10).empty());
}

TEST_CASE("batches: the last of an epoch is short, and none crosses its end") {
  const std::vector<Update> plan = updates(ten_in_fours(), 10);
  REQUIRE(plan.size() == 6);
  const std::vector<std::vector<int64_t>> right = {{0, 4, 0},  {4, 4, 0},  {8, 2, 0},
                                                   {10, 4, 1}, {14, 4, 1}, {18, 2, 1}};
  for (size_t t = 0; t < plan.size(); ++t)
    CHECK(std::vector<int64_t>{plan[t].first, plan[t].samples, plan[t].epoch} == right[t]);
}

TEST_CASE("in every epoch each sample is used once, whatever the batch") {
  for (const int batch : {1, 3, 4, 5, 10, 64}) {
    Config config = ten_in_fours();
    config.batch = batch;
    config.epochs = 3;
    const std::vector<int32_t> order = sample_order(config, 10);
    std::vector<std::multiset<int32_t>> used(3);
    for (const Update& u : updates(config, 10))
      for (int i = 0; i < u.samples; ++i) used[u.epoch].insert(order.at(u.first + i));
    for (const auto& samples : used)
      CHECK(samples == std::multiset<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
  }
}

TEST_CASE("shares: every one of n things is owned once, in order, sizes differ by at most one") {
  for (int n = 0; n <= 20; ++n)
    for (int p = 1; p <= 9; ++p) {
      int64_t next = 0;
      for (int r = 0; r < p; ++r) {
        const Share mine = share(n, r, p);
        CHECK(mine.first == next);
        CHECK((mine.size() == n / p || mine.size() == n / p + 1));
        next = mine.last;
      }
      CHECK(next == n);
    }
  CHECK(share(10, 1, 4).first == 2);
  CHECK(share(10, 1, 4).last == 5);
  CHECK(share(int64_t{1} << 40, 7, 8).last == int64_t{1} << 40);
}

TEST_CASE("the learning rate grows with the batch by the rule that was asked for") {
  Config config;
  config.lr = 0.1;
  config.base_batch = 32;
  config.batch = 128;
  config.lr_scale = LrScale::none;
  CHECK(learning_rate(config, 0, 10) == Approx(0.1).epsilon(1e-15));
  config.lr_scale = LrScale::sqrt;
  CHECK(learning_rate(config, 0, 10) == Approx(0.2).epsilon(1e-15));
  config.lr_scale = LrScale::linear;
  CHECK(learning_rate(config, 0, 10) == Approx(0.4).epsilon(1e-15));
  config.batch = 32;
  CHECK(learning_rate(config, 0, 10) == Approx(0.1).epsilon(1e-15));
}

TEST_CASE("warm-up rises to the rate, cosine falls from it") {
  Config config;
  config.lr = 0.8;
  config.warmup = 4;
  CHECK(near(rates(config, 6), {0.2, 0.4, 0.6, 0.8, 0.8, 0.8}));
  config.lr_schedule = LrSchedule::cosine;  // over the 4 updates after the warm-up
  const double r = std::sqrt(0.5);
  CHECK(near(rates(config, 8),
             {0.2, 0.4, 0.6, 0.8, 0.8, 0.4 * (1 + r), 0.4, 0.4 * (1 - r)}));
  config.warmup = 0;
  CHECK(near(rates(config, 2), {0.8, 0.4}));
}

TEST_CASE("the rate is finite at every update, also where the warm-up is all there is") {
  for (const int warmup : {0, 1, 9, 10, 12})
    for (const int total : {1, 2, 10})
      for (const LrSchedule schedule : {LrSchedule::constant, LrSchedule::cosine}) {
        Config config;
        config.warmup = warmup;
        config.lr_schedule = schedule;
        for (const double rate : rates(config, total)) {
          CHECK(std::isfinite(rate));
          CHECK(rate > 0);
          CHECK(rate <= config.lr);
        }
      }
}
