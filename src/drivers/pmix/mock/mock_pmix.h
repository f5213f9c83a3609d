// PMIx in one process, for tests: a world of clients that see what others have put once all have fenced, and names as
// soon as they are published.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "drivers/pmix/pmix.h"

namespace paceline::drivers {

class MockPmix {
 public:
  explicit MockPmix(uint32_t size) : size_(size) {}

  static std::shared_ptr<PmixClient> client(std::shared_ptr<MockPmix> world, uint32_t rank) {
    return std::make_shared<Client>(std::move(world), rank);
  }

 private:
  struct Client final : PmixClient {
    Client(std::shared_ptr<MockPmix> world, uint32_t rank)
        : world_(std::move(world)), rank_(rank) {}
    [[nodiscard]] uint32_t rank() const override { return rank_; }
    Status put(const std::string& key, const std::string& value) override {
      staged_[{rank_, key}] = value;
      return {};
    }
    Status commit() override {
      std::lock_guard lock(world_->mutex_);
      world_->committed_.merge(staged_);
      return {};
    }
    Status fence() override {
      std::unique_lock lock(world_->mutex_);
      auto round = world_->round_;
      if (++world_->arrived_ == world_->size_) {
        world_->arrived_ = 0;
        ++world_->round_;
        world_->visible_ = world_->committed_;
        world_->changed_.notify_all();
      } else {
        world_->changed_.wait(lock, [&] { return world_->round_ != round; });
      }
      return {};
    }
    Result<std::optional<std::string>> get(uint32_t rank, const std::string& key) override {
      std::lock_guard lock(world_->mutex_);
      auto found = world_->visible_.find({rank, key});
      if (found == world_->visible_.end()) return std::optional<std::string>();
      return std::optional<std::string>(found->second);
    }
    Status publish(const std::string& name) override {
      std::lock_guard lock(world_->mutex_);
      world_->published_.insert(name);
      return {};
    }
    Result<bool> is_published(const std::string& name) override {
      std::lock_guard lock(world_->mutex_);
      return world_->published_.contains(name);
    }
    std::shared_ptr<MockPmix> world_;
    uint32_t rank_;
    std::map<std::pair<uint32_t, std::string>, std::string> staged_;
  };

  using Entries = std::map<std::pair<uint32_t, std::string>, std::string>;
  uint32_t size_;
  uint32_t arrived_ = 0;
  uint64_t round_ = 0;
  Entries committed_;
  Entries visible_;
  std::set<std::string> published_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace paceline::drivers
