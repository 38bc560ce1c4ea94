// Ranks in separate processes: the environment, and how rank 0's bytes reach the others.
#include "../common/launch.h"

#include <future>
#include <map>

#include "catch.h"

namespace {

// Sets variables for one test, and clears them and all others that could matter.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& variables) {
    clear();
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() { clear(); }

 private:
  static void clear() {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS",
          "SLURM_LOCALID"})
      unsetenv(name);
  }
};

std::string refusal(const std::map<std::string, std::string>& variables) {
  const Environment environment(variables);
  try {
    place_from_environment();
  } catch (const BadInput& e) {
    return e.what();
  }
  return "";
}

Place place(int rank, int size, int port, const std::string& host = "127.0.0.1") {
  Place p;
  p.rank = rank;
  p.size = size;
  p.host = host;
  p.port = port;
  p.launched = true;
  return p;
}

struct Answer {
  std::string bytes, error;
};

std::future<Answer> start(const Place& me, double seconds = 20) {
  return std::async(std::launch::async, [=] {
    Answer answer;
    answer.bytes = me.rank == 0 ? std::string(128, 'x') : std::string(128, '-');
    try {
      exchange(me, answer.bytes.data(), 128, seconds);
    } catch (const std::exception& e) {
      answer.error = e.what();
    }
    return answer;
  });
}

int connect_to(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int tries = 0; tries < 100; ++tries) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return fd;
    close(fd);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return -1;
}

}  // namespace

TEST_CASE("without a launcher this is the only process") {
  const Environment environment({});
  CHECK_FALSE(place_from_environment().launched);
}

TEST_CASE("the names of torchrun, mpirun and srun are understood") {
  const std::map<std::string, std::string> names[] = {
      {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}},
      {{"OMPI_COMM_WORLD_RANK", "5"},
       {"OMPI_COMM_WORLD_SIZE", "8"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}},
      {{"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"}}};
  for (auto variables : names) {
    variables["MASTER_ADDR"] = "node-0";
    variables["MASTER_PORT"] = "29500";
    const Environment environment(variables);
    const Place p = place_from_environment();
    CHECK(p.launched);
    CHECK(p.rank == 5);
    CHECK(p.size == 8);
    CHECK(p.local == 1);
    CHECK(p.host == "node-0");
    CHECK(p.port == 29500);
  }
}

TEST_CASE("a launcher's single process is an ordinary run") {
  const Environment environment({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  CHECK_FALSE(place_from_environment().launched);
  CHECK(refusal({{"RANK", "1"}, {"WORLD_SIZE", "1"}}).find("RANK: \"1\"") != std::string::npos);
}

TEST_CASE("missing, malformed and contradictory variables are refused by name") {
  const std::map<std::string, std::string> right = {{"RANK", "1"},
                                                    {"WORLD_SIZE", "2"},
                                                    {"LOCAL_RANK", "1"},
                                                    {"MASTER_ADDR", "h"},
                                                    {"MASTER_PORT", "29500"}};
  CHECK(refusal(right).empty());
  for (const auto& [name, value] : right) {
    std::map<std::string, std::string> without = right;
    without.erase(name);
    INFO(name << ": " << refusal(without));
    CHECK(refusal(without).find(name) != std::string::npos);
  }
  const std::pair<std::string, std::string> wrong[] = {
      {"RANK", "2"},        {"RANK", "-1"},           {"RANK", "one"},
      {"WORLD_SIZE", "0"},  {"WORLD_SIZE", "2 "},     {"LOCAL_RANK", "2"},
      {"MASTER_PORT", "0"}, {"MASTER_PORT", "65536"}, {"MASTER_PORT", "x"}};
  for (const auto& [name, value] : wrong) {
    std::map<std::string, std::string> variables = right;
    variables[name] = value;
    INFO(name << "=" << value);
    const std::string message = refusal(variables);
    CHECK(message.find(name) != std::string::npos);
    CHECK(message.find('"' + value + '"') != std::string::npos);
  }
}

TEST_CASE("every rank gets rank 0's bytes, whoever comes first") {
  for (const int size : {1, 2, 4}) {
    for (const bool zero_first : {true, false}) {
      const int port = free_port();
      std::vector<std::future<Answer>> ranks;
      for (int i = 0; i < size; ++i) {
        ranks.push_back(start(place(zero_first ? i : size - 1 - i, size, port)));
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
      }
      for (auto& rank : ranks) {
        const Answer answer = rank.get();
        CHECK(answer.error.empty());
        CHECK(answer.bytes == std::string(128, 'x'));
      }
    }
  }
}

TEST_CASE("names and IPv6 addresses reach rank 0 too") {
  char name[256] = "localhost";
  gethostname(name, sizeof name);
  for (const std::string& host :
       {std::string("localhost"), std::string("::1"), std::string(name)}) {
    std::string why;
    if (open_socket(host.c_str(), 0, why, [](int fd, const addrinfo* a) {
          return bind(fd, a->ai_addr, a->ai_addrlen);
        }) < 0)
      continue;  // this machine has no such address
    const int port = free_port();
    auto other = start(place(1, 2, port, host)), zero = start(place(0, 2, port, host));
    INFO(host);
    CHECK(zero.get().error.empty());
    CHECK(other.get().bytes == std::string(128, 'x'));
  }
}

TEST_CASE("a stranger's connection is not taken for a rank") {
  const int port = free_port();
  auto zero = start(place(0, 2, port));
  const int silent = connect_to(port), talker = connect_to(port), leaver = connect_to(port);
  REQUIRE(talker >= 0);
  CHECK(write(talker, "GET / HTTP/1.0\r\nHost: nobody\r\n\r\n", 33) == 33);
  close(leaver);
  auto other = start(place(1, 2, port));
  CHECK(zero.get().error.empty());
  CHECK(other.get().bytes == std::string(128, 'x'));
  char byte;
  CHECK(read(talker, &byte, 1) <= 0);  // and learns nothing
  close(silent);
  close(talker);
}

TEST_CASE("a stranger's answer is not taken for rank 0's") {
  const int port = free_port();
  const Socket server = listen_at("127.0.0.1", port);
  auto other = start(place(1, 2, port));
  const Socket caller(accept(server, nullptr, nullptr));
  const std::string answer(sizeof(Hello) + 128, 'y');
  CHECK(caller.write(answer.data(), answer.size()));
  const Answer got = other.get();
  CHECK(got.error.find("has not answered") != std::string::npos);
  CHECK(got.bytes == std::string(128, '-'));
}

TEST_CASE("two ranks of one number end all, with the number") {
  const int port = free_port();
  auto zero = start(place(0, 3, port)), one = start(place(2, 3, port)),
       two = start(place(2, 3, port));
  CHECK(zero.get().error.find("two processes call themselves rank 2") != std::string::npos);
  CHECK(one.get().error.find("has not answered") != std::string::npos);
  CHECK_FALSE(two.get().error.empty());
}

TEST_CASE("ranks of two runs do not mix") {
  const int port = free_port();
  auto zero = start(place(0, 2, port)), other = start(place(1, 3, port));
  CHECK(zero.get().error.find("rank 1 of 3") != std::string::npos);
  CHECK_FALSE(other.get().error.empty());
}

TEST_CASE("who waits in vain gives up in time and says for whom") {
  const auto begin = Clock::now();
  const int port = free_port();
  auto zero = start(place(0, 4, port), 1.5), two = start(place(2, 4, port), 1.5);
  CHECK(zero.get().error.find("2 of 4 ranks have not called") != std::string::npos);
  CHECK_FALSE(two.get().error.empty());
  const Answer alone = start(place(1, 2, free_port()), 0.5).get();
  CHECK(alone.error.find("cannot be reached") != std::string::npos);
  const Answer nowhere = start(place(1, 2, 1234, "no.such.host.invalid"), 0.5).get();
  CHECK(nowhere.error.find("no.such.host.invalid") != std::string::npos);
  CHECK(seconds_until(begin) > -10);
}

TEST_CASE("a port that is taken is refused by number") {
  const int port = free_port();
  const Socket taken = listen_at("127.0.0.1", port);
  const Answer zero = start(place(0, 2, port)).get();
  CHECK(zero.error.find("MASTER_PORT " + std::to_string(port)) != std::string::npos);
}
