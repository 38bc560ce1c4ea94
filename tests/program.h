// Runs a built chapter's program as a user would, and keeps what it says.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "temporary.h"

struct Outcome {
  int status = -1;
  std::string out, err;
};

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The chapters' programs lie beside the folder of the tests' programs.
inline std::string program(const std::string& chapter) {
  const auto tests = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  return (tests.parent_path() / chapter).string();
}

// A command for the shell: variables, a program, options.
inline Outcome run_command(const std::string& command) {
  const TemporaryFolder folder;
  const std::string redirected = "( " + command + " ) > " + folder.path("out") + " 2> " +
                                 folder.path("err") + " < /dev/null";
  const int how = std::system(redirected.c_str());
  return {WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how), contents(folder.path("out")),
          contents(folder.path("err"))};
}

inline Outcome run_chapter(const std::string& chapter, const std::string& arguments) {
  return run_command(program(chapter) + " " + arguments);
}
