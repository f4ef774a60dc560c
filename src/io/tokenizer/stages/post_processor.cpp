#include "io/tokenizer/stages/post_processor.h"

#include "io/tokenizer/nesting.h"

namespace nanovllm {

PostProcessor::PostProcessor(const Entry& entry, int32_t vocab_size) {
  std::vector<Entry> steps;
  flatten_sequence(entry, "processors", steps);
  for (const Entry& step : steps) {
    if (step.type() == "TemplateProcessing") {
      add_template(step, vocab_size);
    } else if (step.type() != "ByteLevel") {  // which only moves offsets
      step.refuse_type("Sequence, TemplateProcessing, ByteLevel");
    }
  }
}

void PostProcessor::add_template(const Entry& entry, int32_t vocab_size) {
  std::vector<int32_t> before, after;
  bool text_seen = false;
  for (const Entry& piece : entry.required("single").elements()) {
    if (const auto sequence = piece.member("Sequence")) {
      check(sequence->string("id") == "A" && !text_seen, ErrorKind::model,
            "{}: a template for one text must contain the sequence A once", piece.place());
      text_seen = true;
      continue;
    }
    const std::string& name = piece.required("SpecialToken").string("id");
    const Entry special = entry.required("special_tokens").required(name);
    for (const Entry& id : special.required("ids").elements())
      (text_seen ? after : before).push_back(static_cast<int32_t>(id.integer(vocab_size - 1)));
  }
  check(text_seen, ErrorKind::model, "{}.single does not contain the sequence A", entry.place());
  before_.insert(before_.begin(), before.begin(), before.end());
  after_.insert(after_.end(), after.begin(), after.end());
}

}  // namespace nanovllm
