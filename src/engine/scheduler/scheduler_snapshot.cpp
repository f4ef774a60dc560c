// Scheduler::add_to(): what a picture of the engine shows.
#include "engine/scheduler/scheduler.h"

namespace nanovllm {
namespace {

BlockState state_of(const BlockManager& blocks, int32_t block) {
  if (blocks.ref_count(block) == 0)
    return blocks.is_cached(block) ? BlockState::cached : BlockState::free;
  return blocks.is_cached(block) ? BlockState::used_and_cached : BlockState::used;
}

}  // namespace

void Scheduler::add_to(EngineSnapshot& snapshot, int64_t most) const {
  snapshot.blocks.resize(static_cast<size_t>(blocks_.num_blocks()));
  for (int32_t block = 0; block < blocks_.num_blocks(); ++block)
    snapshot.blocks[static_cast<size_t>(block)] = state_of(blocks_, block);
  const auto add = [&](const SequenceQueue& queue, std::vector<SequenceSnapshot>& into) {
    for (const Sequence* s = queue.front(); s && std::ssize(into) < most; s = s->next)
      into.push_back(
          {.arrival = s->arrival,
           .num_prompt_tokens = s->num_prompt_tokens,
           .num_generated = s->num_generated(),
           .max_tokens = s->max_tokens,
           .num_computed_tokens = s->num_computed_tokens,
           .num_cached_tokens = s->num_cached_tokens,
           .num_scheduled_tokens = s->last_step == last_planned_ ? s->num_scheduled_tokens : 0,
           .num_preemptions = s->num_preemptions,
           .block_table = s->block_table});
  };
  add(running_, snapshot.running);
  add(waiting_, snapshot.waiting);
}

}  // namespace nanovllm
