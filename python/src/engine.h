// The body of Python's LLM: nanovllm::LLM with the GIL let go while the engine works.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nlohmann/json.hpp>

#include "chat/tools.h"
#include "convert.h"
#include "io/json.h"
#include "owner.h"

namespace nanovllm::python {

/// One thread at a time calls it: llm.py holds a lock.
class Engine {
 public:
  Engine(const std::string& model, const nb::dict& options);
  ~Engine();

  /// Runs the prompts to their ends and returns their outputs in order. `params` is JSON, one for
  /// each prompt. All are checked before the first begins. Signals are looked at once a step: a
  /// Python handler that raises ends the requests and is raised here. `on_progress`, unless None,
  /// is called as (finished requests, prompt tokens/s, generated tokens/s).
  nb::list generate(const std::vector<nb::object>& prompts, const std::vector<std::string>& params,
                    const nb::object& on_progress);
  int64_t add_request(nb::handle prompt, const std::string& params);
  /// ([output], prompt tokens or minus generated tokens of this step)
  nb::tuple step();
  void abort_request(int64_t id) { llm().abort_request(id); }
  void reset_prefix_cache() { llm().reset_prefix_cache(); }
  EngineStats stats() { return llm().stats(); }
  bool is_finished() { return set_aside_.empty() && llm().is_finished(); }
  /// Frees the engine; every later call throws.
  void exit();
  /// At the interpreter's end: as after exit() every later call throws, and so does a generate() of
  /// another thread, soon. A thread that came back from a step later could not have the GIL.
  void stop();
  /// Throws where the engine has been freed, or belongs to another process; llm() does, too.
  Pinned pin();

 private:
  struct Pending;
  LLM& llm();
  void run(Pending& pending, const nb::object& on_progress);

  Owner owner_;
  std::shared_mutex life_;  // shared by pin(), alone by exit()
  std::unique_ptr<LLM> llm_;
  bool is_generating_ = false;
  std::atomic<bool> is_stopping_{false};
  std::vector<RequestOutput> set_aside_;  // of others' requests, for the next step()
};

/// Throws ValueError in Python where there is none.
inline const Tokenizer& tokenizer_of(const LLM& llm) {
  if (!llm.tokenizer())
    throw Error(ErrorKind::invalid_argument,
                "there is no tokenizer: it was left out by skip_tokenizer_init");
  return *llm.tokenizer();
}

/// The methods of both kinds of engine that lead to their LLM, for any thread.
template <class Class>
void bind_common(nb::class_<Class>& c) {
  c.def("chat_prompt", [](Class& self, const std::string& messages, const std::string& options) {
    const Pinned pinned = self.pin();
    const nb::gil_scoped_release release;
    return pinned.llm.chat_prompt(messages, options);
  });
  // As the server takes messages: those in OpenAI's form become those of templates.
  c.def("openai_prompt", [](Class& self, const std::string& messages, const std::string& options) {
    const Pinned pinned = self.pin();
    const nb::gil_scoped_release release;
    Json list = parse_json(messages, "messages", ErrorKind::invalid_argument);
    complete_messages(list);
    return pinned.llm.chat_prompt(dump_json(list), options);
  });
  c.def("encode", [](Class& self, nb::str given, bool add_special_tokens) {
    const std::string text = to_text(given);
    const Pinned pinned = self.pin();
    const nb::gil_scoped_release release;
    return tokenizer_of(pinned.llm).encode(text, add_special_tokens);
  });
  c.def("tokenize", [](Class& self, nb::handle prompt) {
    const Prompt given = to_prompt(prompt);
    const Pinned pinned = self.pin();
    const nb::gil_scoped_release release;
    return pinned.llm.tokenize(given);
  });
  c.def("decode", [](Class& self, const std::vector<int32_t>& ids, bool skip_special_tokens) {
    return tokenizer_of(self.pin().llm).decode(ids, skip_special_tokens);
  });
  c.def("token_to_id", [](Class& self, const std::string& token) {
    return tokenizer_of(self.pin().llm).token_to_id(token);
  });
  c.def("id_to_token", [](Class& self, int32_t id) {
    return std::string(tokenizer_of(self.pin().llm).id_to_token(id));
  });
  c.def("tokenizer_facts", [](Class& self) {
    const Pinned pinned = self.pin();
    const Tokenizer& tokenizer = tokenizer_of(pinned.llm);
    return nb::make_tuple(tokenizer.vocab_size(), tokenizer.bos_token_id(),
                          tokenizer.eos_token_id(), tokenizer.chat_template());
  });
  c.def("info", [](Class& self) { return to_python(self.pin().llm.info()); });
  c.def("stats", [](Class& self) { return to_python(self.stats()); });
  c.def("default_params",
        [](Class& self) { return to_python(self.pin().llm.default_sampling_params()); });
  c.def("reset_prefix_cache", &Class::reset_prefix_cache);
  c.def("exit", &Class::exit);
}

void bind_engine(nb::module_& m);

}  // namespace nanovllm::python
