// The subcommands of `paceline`. Each lives in a file of its own and adds itself to the parser;
// main.cc holds the table. To add one: write `void add_NAME(CLI::App&, Invocation&)` in NAME.cc, declare
// it here, name it in main.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace paceline::cli {

/// What main() shares with a subcommand; outlives parsing.
struct Invocation {
  /// The words after the first "--": the user's command, as it is (the parser never sees them).
  std::vector<std::string> command;
  /// 0 success, 2 wrong usage; else what the subcommand documents.
  int exit_code = 0;
};

/// Adds a subcommand to `app`. Its callback does the work and sets invocation.exit_code.
using AddCommand = void (*)(CLI::App& app, Invocation& invocation);

void add_run(CLI::App& app, Invocation& invocation);
void add_doctor(CLI::App& app, Invocation& invocation);
void add_lab(CLI::App& app, Invocation& invocation);
void add_lab_bytes(CLI::App& app, Invocation& invocation);
void add_bench(CLI::App& app, Invocation& invocation);

/// Makes `run`'s words regular: mpirun's long options with one dash (`-np 4`, `-hostfile F`) get
/// their second, and "--" is put in front of the user's command where it was left out.
std::vector<std::string> normalise_run_arguments(const std::vector<std::string>& arguments);

}  // namespace paceline::cli
