// Every test program's main: runs the tests and counts them. The counts also go to the file
// named by COUNTS after every test, so that a crash does not lose those before it.
#define CATCH_CONFIG_RUNNER
#include "catch.h"

#include <cstdio>
#include <cstdlib>

namespace {

int passed = 0, failed = 0;

class Count : public Catch::EventListenerBase {
 public:
  using Catch::EventListenerBase::EventListenerBase;

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    ++(stats.totals.testCases.failed ? failed : passed);
    const char* path = std::getenv("COUNTS");
    std::FILE* file = path ? std::fopen(path, "w") : nullptr;
    if (!file) return;
    std::fprintf(file, "%d %d\n", passed, failed);
    std::fclose(file);
  }
};

CATCH_REGISTER_LISTENER(Count)

}  // namespace

int main(int argc, char** argv) {
  const int status = Catch::Session().run(argc, argv);
  std::printf("%d passed, %d failed\n", passed, failed);
  return status;
}
