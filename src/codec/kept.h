// Working memory that outlives a call.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace paceline::codec {

/// Keeps what calls work with for the calls that follow: as many objects as there were calls at once, whichever threads
/// make them. From any thread.
template <class T>
class Kept {
  struct Node {
    T value;
    uint64_t time = 0;
    std::unique_ptr<Node> next;
  };

 public:
  /// An object that a call has to itself.
  class Loan {
   public:
    Loan(Kept& owner, std::unique_ptr<Node> node) : owner_(owner), node_(std::move(node)) {}
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() { owner_.give_back(std::move(node_)); }
    T& operator*() const { return node_->value; }

   private:
    Kept& owner_;
    std::unique_ptr<Node> node_;
  };

  /// The one that was given back last, or a new one.
  Loan take() {
    const std::lock_guard lock(mutex_);
    if (idle_ == nullptr) {
      auto fresh = std::make_unique<Node>();
      fresh->time = time_;
      return {*this, std::move(fresh)};
    }
    auto node = std::move(idle_);
    idle_ = std::move(node->next);
    return {*this, std::move(node)};
  }
  /// Frees what is kept; what is on loan, when it is given back.
  void forget() {
    std::unique_ptr<Node> freed;  // once the lock is open
    const std::lock_guard lock(mutex_);
    ++time_;
    freed = std::move(idle_);
  }

 private:
  void give_back(std::unique_ptr<Node> node) {
    const std::lock_guard lock(mutex_);
    if (node->time != time_) return;
    node->next = std::move(idle_);
    idle_ = std::move(node);
  }

  std::mutex mutex_;
  uint64_t time_ = 0;  ///< how many times all was forgotten
  std::unique_ptr<Node> idle_;
};

}  // namespace paceline::codec
