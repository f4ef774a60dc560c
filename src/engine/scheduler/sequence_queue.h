// SequenceQueue: a doubly linked list threaded through the sequences themselves, so that one can
// leave from anywhere in O(1). A sequence is in at most one queue.
#pragma once

#include <cstdint>

#include "engine/scheduler/sequence.h"

namespace nanovllm {

class SequenceQueue {
 public:
  Sequence* front() const { return front_; }
  Sequence* back() const { return back_; }
  int64_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  void push_back(Sequence& sequence) { link(sequence, back_, nullptr); }
  /// Before the first that it is before, sought from whichever end: in order of arrival, that is
  /// where it belongs.
  void insert(Sequence& sequence) {
    if (front_ && sequence.is_before(*front_)) return link(sequence, nullptr, front_);
    Sequence* previous = back_;
    while (previous && sequence.is_before(*previous)) previous = previous->previous;
    link(sequence, previous, previous ? previous->next : nullptr);
  }
  void remove(Sequence& sequence) {
    (sequence.previous ? sequence.previous->next : front_) = sequence.next;
    (sequence.next ? sequence.next->previous : back_) = sequence.previous;
    sequence.previous = sequence.next = nullptr;
    --size_;
  }

 private:
  void link(Sequence& sequence, Sequence* previous, Sequence* next) {
    sequence.previous = previous;
    sequence.next = next;
    (previous ? previous->next : front_) = &sequence;
    (next ? next->previous : back_) = &sequence;
    ++size_;
  }

  Sequence* front_ = nullptr;
  Sequence* back_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace nanovllm
