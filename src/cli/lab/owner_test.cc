// What labs leave in the folder of temporary files: whose owner lives stays, whatever became of the rest.
#include "cli/lab/owner.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace paceline::lab {
namespace {

namespace fs = std::filesystem;
using std::chrono::hours;

/// A process that can't be: its number is beyond the kernel's largest. Different ones, of this process alone.
Owner nobody(bool keep = false) {
  static uint64_t count = 0;
  return {999'999'999, static_cast<uint64_t>(getpid()) * 100 + ++count, keep};
}

/// A folder as Folder::make() has it before it is locked and gets its name.
class Fresh {
 public:
  Fresh(const Owner& owner, hours age)
      : path_(fs::path(owner.directory()).parent_path() /
              fmt::format("paceline-fresh-{}", owner.lab_name())) {
    fs::create_directory(path_);
    std::ofstream(path_ / "lock").flush();
    fs::last_write_time(path_, fs::file_time_type::clock::now() - age);
  }
  ~Fresh() { fs::remove_all(path_); }
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;
  [[nodiscard]] bool is_there() const { return fs::exists(path_); }
  [[nodiscard]] int lock() const {
    int fd = open((path_ / "lock").c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
    return fd;
  }

 private:
  fs::path path_;
};

TEST(Stale, FoldersOfLabsThatWereKilledBeforeTheyLockedThemGo) {
  const Fresh dead(nobody(), hours(1)), keeper(nobody(true), hours(1));
  const Fresh of_a_living(Owner::self(false), hours(1));
  const Fresh of_a_container(nobody(), hours(0));  // about to be locked, for all that is known
  const Fresh locked(nobody(), hours(1));
  const int lock = locked.lock();
  remove_stale(false);
  EXPECT_FALSE(dead.is_there());
  EXPECT_FALSE(keeper.is_there()) << "there is nothing in it to keep";
  EXPECT_TRUE(of_a_living.is_there());
  EXPECT_TRUE(of_a_container.is_there());
  EXPECT_TRUE(locked.is_there());
  close(lock);
}

TEST(Stale, ALabIsRemovedWhenNothingIsLeftOfIt) {
  const auto dead = nobody();
  fs::create_directory(dead.directory());
  EXPECT_GE(remove_stale(false).labs, 0);  // another lab on this machine may have been quicker
  EXPECT_FALSE(fs::exists(dead.directory()));
  EXPECT_EQ(remove_lab(dead), 0) << "nothing is left, so all is gone";
}

}  // namespace
}  // namespace paceline::lab
