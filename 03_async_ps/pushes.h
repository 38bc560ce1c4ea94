// What the server notes of each push, and the report's rows made of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace ch03 {

struct Push {
  int rank;           // who computed it, 1 ..
  int64_t batch, age;
};

// The last row tells a test, or a reader, how to do it all again on one GPU: async's update t
// used push t, whose gradient is that of the parameters before update t - age.
inline std::vector<std::pair<std::string, std::string>> push_rows(const std::vector<Push>& pushes,
                                                                  int workers, double seconds) {
  const auto text = [](int64_t n) { return std::to_string(n); };
  std::vector<std::map<int64_t, int64_t>> of_age(workers);
  std::string in_order;
  for (const Push& push : pushes) {
    ++of_age[push.rank - 1][push.age];
    in_order += (in_order.empty() ? "" : " ") + text(push.rank) + ":" + text(push.batch) + ":" +
                text(push.age);
  }
  std::vector<std::pair<std::string, std::string>> rows = {
      {"pushes", text(static_cast<int64_t>(pushes.size()))},
      {"updates a second", seconds > 0 ? text(std::llround(1 / seconds)) : "none"}};
  for (int w = 0; w < workers; ++w) {
    std::string ages;  // "3 of age 0, 12 of age 2"
    for (const auto& [age, n] : of_age[w])
      ages += (ages.empty() ? "" : ", ") + text(n) + " of age " + text(age);
    rows.push_back({"pushes of rank " + text(w + 1), ages.empty() ? "none" : ages});
  }
  rows.push_back({"push order (rank:batch:age)", in_order});
  return rows;
}

}  // namespace ch03
