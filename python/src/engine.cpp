#include "engine.h"

#include <chrono>
#include <mutex>
#include <unordered_map>

namespace nanovllm::python {

using Clock = std::chrono::steady_clock;
constexpr const char* kFreed = "this LLM has been freed by exit()";
// Outputs before a request's end are not seen: the engine need not put them together.
constexpr int kEndAlone = 2;

// Ctrl-C ends loading, too: on the main thread its handler runs between two weights.
Engine::Engine(const std::string& model, const nb::dict& options) {
  EngineConfig config = to_config(options);
  config.on_progress = [](const char*, int64_t, int64_t) { raise_signals(); };
  const nb::gil_scoped_release release;
  llm_ = std::make_unique<LLM>(model, config);
}

// In a child of fork() the engine's threads are missing: waiting for them would never end.
Engine::~Engine() {
  if (!owner_.is_here()) (void)llm_.release();
}

LLM& Engine::llm() {
  owner_.check();
  if (!llm_ || is_stopping_) throw std::runtime_error(kFreed);
  return *llm_;
}

void Engine::stop() {
  owner_.check();
  is_stopping_ = true;
}

Pinned Engine::pin() {
  std::shared_lock lock(life_);
  return {std::move(lock), llm()};
}

void Engine::exit() {
  owner_.check();
  if (is_generating_)  // a signal's handler, or a progress bar, called it
    throw std::runtime_error("exit() inside of generate(): the engine is at work");
  const nb::gil_scoped_release release;
  const std::unique_lock lock(life_);
  llm_.reset();
}

/// The requests of one generate().
struct Engine::Pending {
  std::unordered_map<int64_t, size_t> places;  // in `outputs`, of those that have not ended
  std::vector<RequestOutput> outputs;
};

nb::list Engine::generate(const std::vector<nb::object>& prompts,
                          const std::vector<std::string>& params, const nb::object& on_progress) {
  LLM& engine = llm();
  std::vector<Prompt> given;
  for (const nb::object& prompt : prompts) given.push_back(to_prompt(prompt));
  Pending pending;
  pending.outputs.resize(prompts.size());
  {
    const nb::gil_scoped_release release;
    std::vector<std::vector<int32_t>> tokens;
    std::vector<SamplingParams> sampling;
    auto last_look = Clock::now();
    for (size_t i = 0; i < given.size(); ++i) {
      if (Clock::now() - last_look > std::chrono::milliseconds(100)) {  // there may be very many
        raise_signals();
        last_look = Clock::now();
      }
      // The same parameters for all prompts are read once, and their structure compiled.
      const bool are_new = i == 0 || params[i] != params[i - 1];
      sampling.push_back(are_new ? to_params(params[i], kEndAlone) : sampling.back());
      try {
        tokens.push_back(engine.tokenize(given[i], sampling.back()));
        engine.check_request(tokens.back(), sampling.back());
        if (are_new) (void)engine.compile_grammar(sampling.back());
      } catch (const Error& error) {
        if (given.size() == 1) throw;
        throw Error(error.kind(), "prompt " + std::to_string(i) + ": " + error.what());
      }
    }
    for (size_t i = 0; i < given.size(); ++i)
      pending.places[engine.add_request(Prompt(std::move(tokens[i])), sampling[i])] = i;
  }
  is_generating_ = true;
  try {
    run(pending, on_progress);
  } catch (...) {
    is_generating_ = false;
    throw;
  }
  is_generating_ = false;
  nb::list list;
  for (const RequestOutput& output : pending.outputs)
    list.append(to_python(output, engine.tokenizer(), true));
  return list;
}

// After a signal the requests are aborted, and the loop goes on until they have ended: the engine
// is as good as new for the next call.
void Engine::run(Pending& pending, const nb::object& on_progress) {
  LLM& engine = llm();
  bool interrupted = false;
  const auto abort_all = [&] {
    for (const auto& [id, place] : pending.places) engine.abort_request(id);
  };
  auto last = Clock::now();
  EngineStats before = engine.stats();
  std::optional<nb::python_error> raised;
  while (!pending.places.empty()) {
    {
      const nb::gil_scoped_release release;
      for (RequestOutput& output : engine.step()) {
        const auto known = pending.places.find(output.request_id);
        if (known == pending.places.end())
          set_aside_.push_back(std::move(output));
        else if (output.finished) {
          pending.outputs[known->second] = std::move(output);
          pending.places.erase(known);
        }
      }
    }
    if (interrupted) continue;
    if (is_stopping_) {
      interrupted = true;
      abort_all();
      continue;
    }
    try {
      raise_signals();
      const double seconds = std::chrono::duration<double>(Clock::now() - last).count();
      if (!on_progress.is_none() && (seconds > 0.1 || pending.places.empty())) {
        const EngineStats now = engine.stats();
        on_progress(pending.outputs.size() - pending.places.size(),
                    static_cast<double>(now.prompt_tokens - before.prompt_tokens) / seconds,
                    static_cast<double>(now.generated_tokens - before.generated_tokens) / seconds);
        before = now;
        last = Clock::now();
      }
    } catch (nb::python_error& error) {
      interrupted = true;
      raised.emplace(std::move(error));
      abort_all();
    }
  }
  if (raised) throw std::move(*raised);
  if (is_stopping_) throw std::runtime_error(kFreed);
}

int64_t Engine::add_request(nb::handle prompt, const std::string& params) {
  LLM& engine = llm();
  const Prompt given = to_prompt(prompt);
  const nb::gil_scoped_release release;
  const SamplingParams sampling = to_params(params, kEndAlone);
  std::vector<int32_t> tokens = engine.tokenize(given, sampling);
  engine.check_request(tokens, sampling);
  (void)engine.compile_grammar(sampling);
  return engine.add_request(Prompt(std::move(tokens)), sampling);
}

nb::tuple Engine::step() {
  LLM& engine = llm();
  std::vector<RequestOutput> outputs;
  EngineStats before, now;
  {
    const nb::gil_scoped_release release;
    before = engine.stats();
    outputs = engine.step();
    now = engine.stats();
  }
  outputs.insert(outputs.begin(), std::make_move_iterator(set_aside_.begin()),
                 std::make_move_iterator(set_aside_.end()));
  set_aside_.clear();
  nb::list list;
  for (const RequestOutput& output : outputs)
    list.append(to_python(output, engine.tokenizer(), true));
  const int64_t prompt_tokens = now.prompt_tokens - before.prompt_tokens;
  return nb::make_tuple(
      list, prompt_tokens > 0 ? prompt_tokens : before.generated_tokens - now.generated_tokens);
}

void bind_engine(nb::module_& m) {
  nb::class_<Prompt>(m, "Prompt").def_prop_ro("text", [](const Prompt& prompt) {
    return std::get<std::string>(prompt.value);
  });
  nb::class_<Engine> engine(m, "Engine");
  bind_common(engine);
  engine.def(nb::init<const std::string&, const nb::dict&>())
      .def("generate", &Engine::generate, nb::arg("prompts"), nb::arg("params"),
           nb::arg("on_progress").none())
      .def("add_request", &Engine::add_request, nb::arg().none(), nb::arg())
      .def("step", &Engine::step)
      .def("abort_request", &Engine::abort_request)
      .def("stop", &Engine::stop)
      .def("is_finished", &Engine::is_finished);
}

}  // namespace nanovllm::python
