// Every call of a program fails once: never a plain wrong result, always a message and a
// non-zero exit, in bounded time. And wrong environment variables are refused by name.
#include <chrono>

#include "program.h"
#include "virtual.h"

namespace {

// Runs `command` with the n-th call of a rank failing, for n = 1, 2, ... until a run gets
// through untouched; how many calls that was. `right` judges a result that came out.
int fail_every_call(const std::string& command, const std::string& rank,
                    const std::function<void(const Outcome&)>& judge) {
  for (int n = 1;; ++n) {
    REQUIRE(n < 2000);
    const auto before = std::chrono::steady_clock::now();
    const Outcome o =
        run_command("VIRTUAL_GPU_FAIL=" + std::to_string(n) + rank + " timeout 30 " + command);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - before;
    INFO(n << rank << ": status " << o.status << " after " << took.count() << " s\n" << o.err);
    if (o.status == 0 && o.err.empty()) return n - 1;
    REQUIRE((o.status == 1 || o.status == 2));
    REQUIRE(contains(o.err, "call " + std::to_string(n) + " was told to fail by VIRTUAL_GPU_FAIL"));
    REQUIRE(took.count() < 10);
    judge(o);
  }
}

}  // namespace

TEST_CASE("failures: chapter 01 ends with a message for every call that can fail") {
  const TemporaryFolder folder;
  const std::string options = " --hidden 3 --steps 2 --batch 4 --quiet --save ";
  const Outcome whole = run_chapter("01_single_gpu", options + folder.path("right"));
  REQUIRE(whole.status == 0);
  const std::string right = contents(folder.path("right"));
  REQUIRE(right.size() > 500);
  const int calls = fail_every_call(program("01_single_gpu") + options + folder.path("w"), "",
                                    [&](const Outcome&) {
                                      // Nothing was saved, or what is saved is right.
                                      if (std::filesystem::exists(folder.path("w")))
                                        REQUIRE(contents(folder.path("w")) == right);
                                      std::filesystem::remove(folder.path("w"));
                                    });
  REQUIRE(calls > 50);
  REQUIRE(contents(folder.path("w")) == right);
}

TEST_CASE("failures: two ranks end with a message for every call of either that can fail") {
  const std::string right = "30 30\n";
  REQUIRE(run_command(program("programs/two_ranks")).out == right);
  for (const char* rank : {":0", ":1"}) {
    const int calls = fail_every_call(program("programs/two_ranks"), rank, [&](const Outcome& o) {
      REQUIRE(o.status == 1);
      REQUIRE((o.out == "" || o.out == right));
    });
    REQUIRE(calls > 30);
  }
}

TEST_CASE("failures: in the virtual GPU's own interface the n-th call fails, and no other") {
  Fresh fresh{{"VIRTUAL_GPU_FAIL", "3:1"}};
  void* p = nullptr;
  int d = 0;
  for (int i = 0; i < 5; ++i) REQUIRE(cudaGetDevice(&d) == cudaSuccess);  // of GPU 0
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  REQUIRE(cudaMalloc(&p, 4) == cudaSuccess);
  fails_with(cudaMalloc(&p, 4), cudaErrorUnknown,
             {"cudaMalloc: GPU 1's call 3 was told to fail by VIRTUAL_GPU_FAIL"});
  REQUIRE(cudaMalloc(&p, 4) == cudaSuccess);
}

namespace {

void nccl_call_fails(int n, const std::function<ncclResult_t(ncclComm_t)>& call) {
  Fresh fresh{{"VIRTUAL_GPU_FAIL", std::to_string(n)}};
  ncclUniqueId id;
  ncclComm_t comm = nullptr;
  MUST(ncclGetUniqueId(&id));
  MUST(ncclCommInitRank(&comm, 1, id, 0));
  fails_with(call(comm), ncclSystemError, {"was told to fail by VIRTUAL_GPU_FAIL"});
  ncclCommDestroy(comm);
}

}  // namespace

TEST_CASE("failures: NCCL's small calls fail when told to as well") {
  nccl_call_fails(3, [](ncclComm_t c) {
    int x;
    return ncclCommCount(c, &x);
  });
  nccl_call_fails(3, [](ncclComm_t c) {
    int x;
    return ncclCommUserRank(c, &x);
  });
  nccl_call_fails(3, [](ncclComm_t c) {
    int x;
    return ncclCommCuDevice(c, &x);
  });
  nccl_call_fails(3, [](ncclComm_t c) {
    ncclResult_t x;
    return ncclCommGetAsyncError(c, &x);
  });
  nccl_call_fails(3, [](ncclComm_t c) { return ncclCommDestroy(c); });
  nccl_call_fails(3, [](ncclComm_t c) { return ncclCommAbort(c); });
  nccl_call_fails(3, [](ncclComm_t) { return ncclGroupStart(); });
  nccl_call_fails(4, [](ncclComm_t) {
    MUST(ncclGroupStart());
    return ncclGroupEnd();
  });
  nccl_call_fails(5, [](ncclComm_t) {  // the inner end of two: comes out of the outer as well
    MUST(ncclGroupStart());
    MUST(ncclGroupStart());
    REQUIRE(ncclGroupEnd() == ncclSystemError);
    return ncclGroupEnd();
  });
}

// ---- the environment -----------------------------------------------------------------------

namespace {

// The chapter's program refuses it: status 2, one line that names the variable and its value.
void refused(const std::string& variable, const std::string& value, const std::string& says) {
  const Outcome o = run_command("env '" + variable + "=" + value + "' " + program("01_single_gpu") +
                                " --steps 0 --quiet");
  INFO(variable << "=" << value << ": status " << o.status << "\n" << o.out << o.err);
  REQUIRE(o.status == 2);
  REQUIRE(o.out == "");
  REQUIRE(std::count(o.err.begin(), o.err.end(), '\n') == 1);
  REQUIRE(contains(o.err, variable));
  REQUIRE(contains(o.err, says));
}

}  // namespace

TEST_CASE("environment: an unknown preset or field is refused with those that there are") {
  refused("VIRTUAL_GPU", "h1000", "VIRTUAL_GPU=h1000: no such preset; there are ideal, h100");
  refused("VIRTUAL_GPU", ",launch=1", "no such preset");
  refused("VIRTUAL_GPU", "ideal,speed=3", "no field 'speed'; there are bf16, fp16");
  refused("VIRTUAL_GPU", "ideal,launch", "'launch' is not field=value");
  refused("VIRTUAL_GPU", "ideal,", "'' is not field=value");
  for (const char* value : {"-1", "abc", "", "inf", "nan", "1x"})
    refused("VIRTUAL_GPU", std::string("ideal,launch=") + value,
            std::string("launch=") + value + " is not a number >= 0");
  for (const char* value : {"0", "2.5", "-1", "1e300", "x"})
    refused("VIRTUAL_GPU", std::string("ideal,node_gpus=") + value,
            std::string("node_gpus=") + value);
}

TEST_CASE("environment: a malformed size is refused") {
  for (const char* value :
       {"0", "-5", "64MB", "abc", "M", "nan", "inf", "1e30", "1e12G", "0.5", "64 M"}) {
    refused(
        "VIRTUAL_GPU_MEMORY", value,
        std::string("VIRTUAL_GPU_MEMORY=") + value + " is not a size such as 800000, 64M or 16G");
    refused("VIRTUAL_GPU", std::string("ideal,memory=") + value, "is not a size");
  }
}

TEST_CASE("environment: numbers are whole, inside their range, and nothing else") {
  const std::string whole = " is not a whole number from ";
  for (const char* value : {"-1", "5000", "x", "1.5", "99999999999999999999"})
    refused("VIRTUAL_GPU_COUNT", value, value + whole + "0 to 4096");
  for (const char* value : {"-1", "abc", "1.5", "9223372036854775808"})
    refused("VIRTUAL_GPU_JITTER", value, value + whole + "0");
  for (const char* value : {"0", "-1", "x", "3:", "3:x", ":1", "3:-1", "3:1:1", "3:5000"})
    refused("VIRTUAL_GPU_FAIL", value, whole);
  for (const char* value : {"0", "abc", "4000"})
    refused("VIRTUAL_GPU_INIT_SECONDS", value, value + whole + "1 to 3600");
  for (const char* name : {"VIRTUAL_GPU_STRICT", "VIRTUAL_GPU_SKIP_MATH"})
    for (const char* value : {"2", "yes", "-1"}) refused(name, value, value + whole + "0 to 1");
}

TEST_CASE("environment: no visible GPU is refused by the chapter") {
  for (const char* variable :
       {"CUDA_VISIBLE_DEVICES=", "CUDA_VISIBLE_DEVICES=-1", "VIRTUAL_GPU_COUNT=0"}) {
    const Outcome o = run_command(std::string("env ") + variable + " " + program("01_single_gpu") +
                                  " --steps 0 --quiet");
    INFO(variable << ": " << o.status << " " << o.err);
    REQUIRE(o.status == 2);
    REQUIRE(contains(o.err, "no usable GPU (cudaErrorNoDevice"));
  }
}

TEST_CASE("environment: what is right is taken") {
  const Outcome o = run_command(
      "VIRTUAL_GPU=t4,launch=0,node_gpus=3 VIRTUAL_GPU_MEMORY=1.5M VIRTUAL_GPU_COUNT=1 "
      "VIRTUAL_GPU_JITTER=0 VIRTUAL_GPU_INIT_SECONDS=3600 VIRTUAL_GPU_STRICT=1 " +
      program("01_single_gpu") + " --steps 2 --quiet");
  INFO(o.err);
  REQUIRE(o.status == 0);
  const Outcome small =
      run_command("VIRTUAL_GPU_MEMORY=10K " + program("01_single_gpu") + " --steps 2 --quiet");
  REQUIRE(small.status == 1);
  REQUIRE(contains(small.err, "cudaErrorMemoryAllocation: out of memory: cudaMalloc"));
  REQUIRE(contains(small.err, "of 10240 are free"));
}

TEST_CASE("environment: where the machine starts no more threads, one line says so") {
  if (sanitized) return;  // its shadow memory alone is more than these limits
  // Stacks of 2 GB each: not even a rank's thread fits, or the rank's and no stream's.
  for (const auto& [limit, where] : {std::pair("1500000", "rank 0: this machine starts no mor"),
                                     std::pair("3500000", "cudaStreamCreateWithFlags: this mac")}) {
    const Outcome o = run_command(
        "ulimit -s 2000000 || exit 77; ulimit -v " + std::string(limit) +
        "; OPENBLAS_NUM_THREADS=1 " + program("01_single_gpu") + " --quiet");
    INFO(limit << ": " << o.status << " " << o.err);
    if (o.status == 77) return;  // this shell may not raise it
    REQUIRE(o.status == 1);
    REQUIRE(contains(o.err, where));
    REQUIRE(std::count(o.err.begin(), o.err.end(), '\n') == 1);
  }
}

TEST_CASE("failures: a run of the tests ends in its counts, and shows what the failed one said") {
  const TemporaryFolder folder;
  const auto write = [&](const char* name, const char* text) {
    std::ofstream(folder.path(name)) << text;
  };
  const std::string sum = "tools/summary.sh " + folder.name();
  const Outcome none = run_command(sum);
  REQUIRE(none.status != 0);
  REQUIRE(none.out == "0 passed, 0 failed\n");
  write("good", "3 0\n");
  write("good.said", "all is well\n");
  const Outcome good = run_command(sum);
  REQUIRE(good.status == 0);
  REQUIRE(good.out == "3 passed, 0 failed\n");
  write("bad", "2 1\n");
  write("bad.said", "this went wrong\n");
  const Outcome bad = run_command(sum);
  REQUIRE(bad.status == 1);
  REQUIRE(bad.out == "FAILED: bad\nthis went wrong\n5 passed, 1 failed\n");
}
