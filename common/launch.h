// Ranks in separate processes, in plain C++ over POSIX: who am I, how rank 0's NCCL id reaches
// the others, and how a program starts itself once for each rank. (NCCL's own NCCL_COMM_ID
// needs all hosts in one subnet, so the id travels over a connection of ours.)
#pragma once

#include <netdb.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "options.h"

// ---- who am I -----------------------------------------------------------------------------

struct Place {
  int rank = 0, size = 1, local = 0;  // local: among the ranks of this machine
  bool launched = false;              // one of several processes, by a launcher or by us
  std::string host;                   // where rank 0 hands out the NCCL id
  int port = 0;
};

inline std::string variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? value : "";
}

inline int number_in(const std::string& name, int least, int most) {
  int value = 0;
  if (!parse(variable(name), value) || value < least || value > most)
    throw BadInput("environment variable " + name + ": \"" + variable(name) +
                   "\" given, a whole number from " + std::to_string(least) + " to " +
                   std::to_string(most) + " would be right");
  return value;
}

// torchrun's names, then mpirun's, then srun's. A launcher's single process is an ordinary run.
inline Place place_from_environment() {
  const std::string families[][3] = {
      {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
      {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
  Place place;
  for (const auto& [rank, size, local] : families) {
    if (variable(rank).empty() && variable(size).empty()) continue;
    place.size = number_in(size, 1, 1 << 20);
    place.launched = place.size > 1;
    if (place.launched || !variable(rank).empty())
      place.rank = number_in(rank, 0, place.size - 1);
    if (!place.launched) return place;
    place.local = number_in(local, 0, place.rank);
    place.host = variable("MASTER_ADDR");
    if (place.host.empty())
      throw BadInput("environment variable MASTER_ADDR: not set, but " + size + " is " +
                     variable(size) +
                     "; set it to the host of rank 0, and MASTER_PORT to a free "
                     "port there");
    place.port = number_in("MASTER_PORT", 1, 65535);
    // torchrun's agent listens at that port itself; the next one is as free as any.
    if (!variable("TORCHELASTIC_RUN_ID").empty()) place.port += place.port < 65535 ? 1 : -1;
    return place;
  }
  return place;
}

// ---- a few bytes from rank 0 to all -------------------------------------------------------

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept { return std::swap(fd_, other.fd_), *this; }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  operator int() const { return fd_; }

  // A peer that falls silent holds up no call for longer than this.
  void patience(double seconds) const {
    const timeval time = {static_cast<time_t>(seconds), static_cast<int>(seconds * 1e6) % 1000000};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
  }
  bool write(const void* from, size_t n) const {
    return ::send(fd_, from, n, MSG_NOSIGNAL) == static_cast<ssize_t>(n);
  }
  bool read(void* to, size_t n) const {
    return ::recv(fd_, to, n, MSG_WAITALL) == static_cast<ssize_t>(n);
  }

 private:
  int fd_;
};

// A socket for which use(socket, address) returns 0 at one of the host's addresses (IPv4 or
// IPv6), or an invalid one and `why`. host = nullptr: this machine's.
template <class Use>
Socket open_socket(const char* host, int port, std::string& why, Use use) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;  // without a host: all interfaces
  if (const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found))
    why = gai_strerror(error);
  Socket result;
  for (const addrinfo* a = found; a && result < 0; a = a->ai_next) {
    Socket socket(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    socket.patience(1);
    if (socket >= 0 && use(socket, a) == 0)
      result = std::move(socket);
    else
      why = std::strerror(errno);
  }
  if (found) freeaddrinfo(found);
  return result;
}

// What both sides say first, so that a stranger's connection is not taken for one of ours.
struct Hello {
  int32_t rank = 0, size = 0;
  char magic[8] = {'m', 'g', 'p', 'u', '-', 's', 'g', 'd'};
  bool is_ours() const { return std::memcmp(magic, Hello().magic, sizeof magic) == 0; }
};

using Clock = std::chrono::steady_clock;
inline double seconds_until(Clock::time_point end) {
  return std::chrono::duration<double>(end - Clock::now()).count();
}

inline Socket listen_at(const std::string& host, int port) {
  // A loopback name keeps the port on this machine. Any other name opens it on all interfaces,
  // for to itself a machine's own name may mean 127.0.1.1.
  const bool loopback = host == "localhost" || host == "::1" || host.starts_with("127.");
  std::string why;
  Socket server =
      open_socket(loopback ? host.c_str() : nullptr, port, why, [](int fd, const addrinfo* a) {
        const int yes = 1;
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        return bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, SOMAXCONN);
      });
  if (server < 0)
    throw BadInput("MASTER_PORT " + std::to_string(port) + ": " + why + "; a free port on " + host +
                   " would be right");
  return server;
}

// Rank 0 answers nobody before everybody has called: a run with a missing or a doubled rank ends
// here, and not inside NCCL, which would wait for ever.
inline void hand_out(const Place& me, const void* data, size_t n, Clock::time_point end) {
  const Socket server = listen_at(me.host, me.port);
  std::vector<Socket> callers(me.size);
  for (int missing = me.size - 1; missing > 0;) {
    if (seconds_until(end) < 0)
      throw std::runtime_error(std::to_string(missing) + " of " + std::to_string(me.size) +
                               " ranks have not called at " + me.host + ":" +
                               std::to_string(me.port));
    Socket caller(accept(server, nullptr, nullptr));
    Hello hello;
    caller.patience(1);
    if (!caller.read(&hello, sizeof hello) || !hello.is_ours()) continue;  // nobody, or a stranger
    if (hello.size != me.size || hello.rank < 1 || hello.rank >= me.size)
      throw BadInput("a process calls itself rank " + std::to_string(hello.rank) + " of " +
                     std::to_string(hello.size) + ", rank 0 is one of " + std::to_string(me.size));
    if (callers[hello.rank] >= 0)
      throw BadInput("two processes call themselves rank " + std::to_string(hello.rank));
    callers[hello.rank] = std::move(caller);
    --missing;
  }
  const Hello hello{0, me.size};
  for (int r = 1; r < me.size; ++r)
    if (!callers[r].write(&hello, sizeof hello) || !callers[r].write(data, n))
      throw std::runtime_error("rank " + std::to_string(r) + " left before the run began");
}

// The other ranks call until rank 0 is up, and then wait until all are.
inline void fetch(const Place& me, void* data, size_t n, Clock::time_point end) {
  const std::string there = "rank 0 at " + me.host + ":" + std::to_string(me.port);
  std::string why = "no time";
  Socket socket;
  while (socket < 0 && seconds_until(end) > 0) {
    socket = open_socket(me.host.c_str(), me.port, why, [](int fd, const addrinfo* a) {
      return connect(fd, a->ai_addr, a->ai_addrlen);
    });
    if (socket < 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (socket < 0) throw std::runtime_error(there + " cannot be reached: " + why);
  Hello hello{me.rank, me.size};
  socket.patience(std::max(1.0, seconds_until(end)));
  if (!socket.write(&hello, sizeof hello) || !socket.read(&hello, sizeof hello) ||
      !hello.is_ours() || !socket.read(data, n))
    throw std::runtime_error(there + " has not answered");
}

// On return every rank has rank 0's n bytes.
inline void exchange(const Place& me, void* data, size_t n, double seconds = 60) {
  const auto end = Clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6));
  if (me.rank == 0) return hand_out(me, data, n, end);
  fetch(me, data, n, end);
}

// ---- one process a rank, started by ourselves ---------------------------------------------

inline int free_port() {
  std::string why;
  sockaddr_in address = {};
  socklen_t length = sizeof address;
  const Socket socket = open_socket("127.0.0.1", 0, why, [](int fd, const addrinfo* a) {
    return bind(fd, a->ai_addr, a->ai_addrlen);
  });
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw std::runtime_error("no free port on 127.0.0.1: " + why);
  return ntohs(address.sin_port);
}

// Starts this program p times, with the same arguments and the variables that tell the ranks
// apart, and waits. The first that fails ends the others, and its exit status is returned.
inline int start_processes(int p, char** argv) {
  const auto set = [](const char* name, const std::string& value) {
    setenv(name, value.c_str(), 1);
  };
  set("SGD_STARTED_BY", std::to_string(getpid()));
  set("WORLD_SIZE", std::to_string(p));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(free_port()));
  // NCCL refuses two ranks on one GPU. From 2.30 on this allows it.
  set("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  // Before, ranks that seem to be on different hosts pass (NCCL_HOSTID below), and talk over the
  // loopback interface if these say so.
  set("NCCL_NET", "Socket");
  set("NCCL_SOCKET_IFNAME", "lo");
  set("NCCL_MNNVL_ENABLE", "0");
  setenv("NCCL_MAX_CTAS", "2", 0);  // all ranks' kernels must fit the GPU at once
  std::signal(SIGCHLD, SIG_DFL);  // were it ignored, waitpid() would learn no status
  std::vector<pid_t> children;
  int status = 0;
  for (int r = 0; r < p && status == 0; ++r) {
    set("RANK", std::to_string(r));
    set("LOCAL_RANK", std::to_string(r));
    set("NCCL_HOSTID", "rank-" + std::to_string(r));
    pid_t child = 0;
    if (const int error = posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, argv, environ)) {
      std::fprintf(stderr, "rank %d cannot be started: %s\n", r, std::strerror(error));
      status = 1;
    } else {
      children.push_back(child);
    }
  }
  for (size_t left = children.size(); left > 0; --left) {
    if (status)  // the others may be waiting for the one that failed
      for (pid_t child : children) kill(child, SIGKILL);
    int how = 0;
    const pid_t ended = waitpid(-1, &how, 0);
    children.erase(std::find(children.begin(), children.end(), ended));
    if (!status) status = WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
  }
  return status;
}

// A rank that start_processes() started must not outlive its starter, however that ends. Linux
// has a call for it; elsewhere ranks may not share a GPU anyway.
inline void die_with_starter() {
  const std::string starter = variable("SGD_STARTED_BY");
  if (starter.empty()) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (std::to_string(getppid()) != starter) std::_Exit(1);  // it ended before the call above
}
