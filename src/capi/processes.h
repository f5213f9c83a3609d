// For tests: ranks as processes of their own, which meet through a store in shared files.
#pragma once

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "paceline/comm.h"

// In a rank's process: leaves with 1, and says where.
#define MUST(condition)                                                        \
  do {                                                                         \
    if (!(condition)) {                                                        \
      std::fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, \
                   paceline_error(nullptr));                                   \
      return 1;                                                                \
    }                                                                          \
  } while (0)

namespace paceline::capi {

/// A key-value store in a directory; a value appears whole.
class FileStore {
 public:
  explicit FileStore(std::string directory) : directory_(std::move(directory)) {}
  paceline_store handle() { return {sizeof(paceline_store), this, put, get}; }
  [[nodiscard]] const std::string& directory() const { return directory_; }

 private:
  static std::string path(void* context, const char* key) {
    std::string name;
    for (const char* c = key; *c != '\0'; ++c)
      name += isalnum(static_cast<unsigned char>(*c)) != 0 ? *c : '_';
    return static_cast<FileStore*>(context)->directory_ + "/" + name;
  }
  static int put(void* context, const char* key, const char* value, size_t bytes) {
    auto to = path(context, key);
    auto part = to + "." + std::to_string(getpid());
    std::ofstream(part, std::ios::binary).write(value, static_cast<std::streamsize>(bytes));
    return std::rename(part.c_str(), to.c_str());
  }
  static long get(void* context, const char* key, char* value, size_t capacity) {
    std::ifstream in(path(context, key), std::ios::binary);
    if (!in) return -1;
    std::string all((std::istreambuf_iterator<char>(in)), {});
    all.copy(value, capacity);
    return static_cast<long>(all.size());
  }
  std::string directory_;
};

/// Runs `body(rank)` in a process per rank and collects what each returns and says. Create it before any threads.
class Processes {
 public:
  using Body = std::function<int(int rank, FileStore& store)>;

  Processes(int size, const Body& body) {
    char name[] = "/tmp/paceline-test-XXXXXX";
    directory_ = mkdtemp(name);
    for (int r = 0; r < size; ++r) {
      std::fflush(nullptr);
      pid_t pid = fork();
      if (pid == 0) {
        alarm(120);  // whatever happens, no test process stays behind
        FileStore store(directory_);
        int code = 99;
        code = body(r, store);
        std::fflush(nullptr);
        _exit(code);
      }
      pids_.push_back(pid);
    }
  }
  ~Processes() {
    for (pid_t pid : pids_) {
      if (pid > 0) {
        kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
      }
    }
    std::filesystem::remove_all(directory_);
  }
  [[nodiscard]] pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  [[nodiscard]] const std::string& directory() const { return directory_; }
  void signal(int rank, int number) const { kill(pid(rank), number); }
  /// The exit code; 128 + signal; -1: still running after `seconds`.
  int wait(int rank, double seconds = 60) {
    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (;;) {
      int status = 0;
      pid_t done = waitpid(pid(rank), &status, WNOHANG);
      if (done == pid(rank)) {
        pids_[static_cast<size_t>(rank)] = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      }
      if (std::chrono::steady_clock::now() > until) return -1;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  /// A file that one process leaves for the test or for others.
  void say(const std::string& name, const std::string& text) const {
    std::ofstream(directory_ + "/" + name) << text;
  }
  [[nodiscard]] std::string heard(const std::string& name) const {
    std::ifstream in(directory_ + "/" + name);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  /// Waits until the file is there.
  [[nodiscard]] bool appears(const std::string& name, double seconds = 30) const {
    auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!std::filesystem::exists(directory_ + "/" + name)) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

 private:
  std::string directory_;
  std::vector<pid_t> pids_;
};

inline paceline_comm* create(int rank, int size, FileStore& store, double timeout_s = 30,
                             const char* face = nullptr) {
  auto handle = store.handle();
  paceline_comm_options o{};
  o.struct_size = sizeof o;
  o.rank = rank;
  o.size = size;
  o.store = &handle;
  o.timeout_s = timeout_s;
  o.face = face;
  paceline_comm* comm = nullptr;
  if (paceline_comm_create(&o, &comm) != PACELINE_OK) {
    std::fprintf(stderr, "rank %d: %s\n", rank, paceline_error(nullptr));
    return nullptr;
  }
  return comm;
}

inline paceline_op_args op_args(int collective, int dtype, const void* input, void* output,
                                uint64_t count) {
  paceline_op_args a{};
  a.struct_size = sizeof a;
  a.collective = collective;
  a.dtype = dtype;
  a.input = input;
  a.output = output;
  a.count = count;
  a.codec = -1;
  a.fp16_values = -1;
  return a;
}

}  // namespace paceline::capi
