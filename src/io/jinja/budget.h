// The limits of one render, counted. Every loop and every allocation of the interpreter goes
// through here.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

#include "io/jinja/render_settings.h"

namespace nanovllm::jinja {

/// Something the template did wrong while running. ChatTemplate::render turns it into an Error with
/// the line.
class RenderError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The steps and memory that a render has used so far.
class Budget {
 public:
  explicit Budget(const ChatTemplateLimits& limits) : limits_(limits) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  /// Throws RenderError where that is more than the limit, as hold() and Level do.
  void spend(size_t steps = 1);
  /// Work in proportion to the length of a text.
  void spend_bytes(size_t bytes) { spend(1 + bytes / 16); }

  /// `bytes` more are alive from here on.
  void hold(size_t bytes);
  void release(size_t bytes) noexcept { held_ -= bytes; }
  /// Throws where `bytes` more could not be held: to be asked before building something large.
  void expect_room(size_t bytes) const;

  const ChatTemplateLimits& limits() const { return limits_; }

  /// One level of recursion, for as long as it lives.
  class Level {
   public:
    explicit Level(Budget& budget);
    ~Level() { --budget_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Budget& budget_;
  };

 private:
  ChatTemplateLimits limits_;
  size_t steps_ = 0;
  size_t held_ = 0;
  size_t depth_ = 0;
};

/// Bytes counted as alive until this dies. Without a budget (a literal of the parsed template) it
/// counts nothing.
class Held {
 public:
  Held() = default;
  Held(Budget& budget, size_t bytes) : budget_(&budget), bytes_(bytes) { budget.hold(bytes); }
  Held(Held&& other) noexcept
      : budget_(std::exchange(other.budget_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Held& operator=(Held&&) = delete;
  ~Held() {
    if (budget_ != nullptr) budget_->release(bytes_);
  }
  void grow(size_t bytes) {
    budget_->hold(bytes);
    bytes_ += bytes;
  }

 private:
  Budget* budget_ = nullptr;
  size_t bytes_ = 0;
};

/// Text under construction, counted as it grows.
class TextBuilder {
 public:
  explicit TextBuilder(Budget& budget) : budget_(budget), held_(budget, 0) {}

  void append(std::string_view text) {
    if (text.size() > capacity_ - text_.size()) reserve(text.size());
    text_.append(text);
  }
  void append(size_t count, char c);
  std::string take() { return std::move(text_); }
  const std::string& view() const { return text_; }

 private:
  void reserve(size_t extra);

  Budget& budget_;
  Held held_;
  std::string text_;
  size_t capacity_ = 0;  // bytes held
};

}  // namespace nanovllm::jinja
