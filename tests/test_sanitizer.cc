// The virtual GPU has CUDA's happens-before and no more: ThreadSanitizer reports a program
// that leaves one call out, and is silent about the same program with it.
#include "program.h"
#include "virtual.h"

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool other_sanitizer = true;  // one build with ThreadSanitizer is enough
#else
constexpr bool other_sanitizer = false;
#endif

// Built with ThreadSanitizer, whatever this test is built with.
std::string two_streams() {
  const auto tests = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return tests.parent_path().parent_path() / "virtual-float-thread/programs/two_streams";
}

void judge(const std::string& name) {
  const std::string options = "TSAN_OPTIONS=exitcode=66 timeout 60 ";
  const Outcome right = run_command(options + two_streams() + " " + name);
  INFO(right.out << right.err);
  REQUIRE(right.status == 0);
  REQUIRE(right.out == "done\n");
  REQUIRE(right.err == "");
  const Outcome broken = run_command(options + two_streams() + " " + name + " broken");
  INFO(broken.out << broken.err);
  REQUIRE(broken.status == 66);
  REQUIRE(contains(broken.err, "WARNING: ThreadSanitizer: data race"));
}

}  // namespace

TEST_CASE("sanitizer: a missing cudaStreamWaitEvent between two kernels is a data race") {
  if (other_sanitizer) return;
  judge("two_kernels");
}

TEST_CASE("sanitizer: reuse of a host buffer before its copy is done is a data race") {
  if (other_sanitizer) return;
  judge("host_buffer");
}

TEST_CASE("sanitizer: a missing event between a kernel and a GEMM is a data race") {
  if (other_sanitizer) return;
  judge("gemm");
}

TEST_CASE("sanitizer: a missing event between compute and an all-reduce is a data race") {
  if (other_sanitizer) return;
  judge("all_reduce");
}

TEST_CASE("sanitizer: a message sent before it is made, overwritten before it is sent, or read "
          "before it is there is a data race") {
  if (other_sanitizer) return;
  for (const char* name : {"before_send", "after_send", "after_receive"}) judge(name);
}
