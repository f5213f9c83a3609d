// What ThreadSanitizer does not look at.
#pragma once

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PACELINE_MOCK_UNDER_TSAN 1
// Of its runtime (dynamic annotations).
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);   // NOLINT
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);     // NOLINT
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);  // NOLINT
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);    // NOLINT
#endif
#endif

namespace paceline::drivers::cuda::mock {

/// While it lives, what this thread reads and writes, if `unseen`.
class Unseen {
 public:
  explicit Unseen([[maybe_unused]] bool unseen) {
#ifdef PACELINE_MOCK_UNDER_TSAN
    unseen_ = unseen;
    if (!unseen_) return;
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
#endif
  }
#ifdef PACELINE_MOCK_UNDER_TSAN
  ~Unseen() {
    if (!unseen_) return;
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  // Not trivial: an object that nobody names again is meant.
  ~Unseen() {}  // NOLINT(modernize-use-equals-default)
#endif
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;

#ifdef PACELINE_MOCK_UNDER_TSAN
 private:
  bool unseen_ = false;
#endif
};

}  // namespace paceline::drivers::cuda::mock
