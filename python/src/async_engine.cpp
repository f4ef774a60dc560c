#include "async_engine.h"

#include <atomic>
#include <chrono>
#include <future>

#include "engine.h"

namespace nanovllm::python {

/// The answer of an endpoint, on its way to a port. It belongs to the server's thread.
class AsyncEngine::Answer : public server::Exchange {
 public:
  Answer(int64_t id, std::shared_ptr<Port> port) : id_(id), port_(std::move(port)) {}
  ~Answer() override {
    if (!is_done_) finish(503, "the engine has been freed by exit()");
  }
  void respond(server::HttpResponse response) override {
    is_done_ = true;
    port_->put(Port::one({.id = id_,
                          .is_answer = true,
                          .status = response.status,
                          .content_type = std::move(response.content_type),
                          .body = std::move(response.body),
                          .is_last = true}));
  }
  void begin_stream(const server::Headers&) override {
    is_streaming_ = true;
    port_->put(Port::one(
        {.id = id_, .is_answer = true, .status = 200, .content_type = "text/event-stream"}));
  }
  void write(std::string_view bytes) override { port_->put_body(id_, bytes); }
  void end_stream() override {
    is_done_ = true;
    port_->put(Port::one({.id = id_, .is_answer = true, .is_last = true}));
  }
  void on_abandoned(std::function<void()> callback) override {
    if (is_abandoned_) return callback();
    callback_ = std::move(callback);
  }
  void abandon() {
    is_abandoned_ = true;
    if (const auto callback = std::exchange(callback_, nullptr)) callback();
  }

 private:
  void finish(int status, const char* why) {
    if (is_streaming_) return end_stream();
    respond({.status = status, .body = why, .content_type = "text/plain"});
  }

  const int64_t id_;
  const std::shared_ptr<Port> port_;
  std::function<void()> callback_;
  bool is_streaming_ = false, is_done_ = false, is_abandoned_ = false;
};

namespace {

constexpr const char* kFreed = "this AsyncLLM has been freed by exit()";

server::ServerOptions to_options(const std::string& model, const nb::dict& options,
                                 const nb::dict& service) {
  server::ServerOptions o;
  o.model = model;
  o.engine = to_config(options);
  o.http.listens = false;
  o.sse_keep_alive_interval = 0;
  o.queue.max_num_queued_reqs = nb::cast<int64_t>(service["max_num_queued_reqs"]);
  o.queue.max_num_queued_tokens = nb::cast<int64_t>(service["max_num_queued_tokens"]);
  o.served_model_names = nb::cast<std::vector<std::string>>(service["served_model_names"]);
  o.generation_config = nb::cast<std::string>(service["generation_config"]);
  o.request_timeout = nb::cast<double>(service["request_timeout"]);
  o.version = nb::cast<std::string>(service["version"]);
  return o;
}

}  // namespace

AsyncEngine::AsyncEngine(const std::string& model, const nb::dict& options,
                         const nb::dict& service) {
  server::ServerOptions serving = to_options(model, options, service);
  const auto is_left = std::make_shared<std::atomic<bool>>(false);  // by the thread that waits
  serving.engine.on_progress = [is_left](const char*, int64_t, int64_t) {
    if (*is_left) throw std::runtime_error("loading was interrupted");
  };
  const nb::gil_scoped_release release;
  auto ready = std::make_shared<std::promise<server::EmbeddedServer>>();
  serving.embedding = {
      .on_ready = [ready](const server::EmbeddedServer& server) { ready->set_value(server); },
      .take = [this](std::vector<RequestOutput>& outputs) { deliver(outputs); }};
  thread_ = std::thread([serving = std::move(serving), ready] {
    try {
      const auto drop = [](const std::string&) {};
      server::serve(serving, {.note = drop, .request = drop});
    } catch (...) {
      // After on_ready the failure is the engine's own, which every request is told.
      try {
        ready->set_exception(std::current_exception());
      } catch (const std::future_error&) {
      }
    }
  });
  std::future<server::EmbeddedServer> future = ready->get_future();
  try {
    while (future.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready)
      raise_signals();
    server_ = future.get();
  } catch (...) {
    *is_left = true;
    try {
      if (future.valid()) future.get().stop();  // the last weight was loaded meanwhile
    } catch (const std::exception&) {
    }
    thread_.join();
    throw;
  }
}

// In a child of fork() the engine's threads are missing: waiting for them would never end.
AsyncEngine::~AsyncEngine() {
  if (!owner_.is_here())
    thread_.detach();
  else if (thread_.joinable())
    exit();
}

void AsyncEngine::exit() {
  owner_.check();
  const nb::gil_scoped_release release;
  const std::unique_lock lock(life_);
  if (!thread_.joinable()) return;
  server_.stop();
  thread_.join();
  server_ = {};
}

template <class Use>
auto AsyncEngine::with_server(Use&& use) {
  owner_.check();
  const nb::gil_scoped_release release;
  const std::shared_lock lock(life_);
  if (!server_.llm) throw std::runtime_error(kFreed);
  return use(server_);
}

Pinned AsyncEngine::pin() {
  owner_.check();
  std::shared_lock lock(life_);
  if (!server_.llm) throw std::runtime_error(kFreed);
  return {std::move(lock), server_.llm->llm()};
}

int64_t AsyncEngine::new_request_id() {
  return with_server([](server::EmbeddedServer& server) { return server.llm->new_request_id(); });
}

void AsyncEngine::add_request(int64_t id, const PortHandle& to, nb::handle prompt,
                              const std::string& params, int kind, double timeout) {
  const Prompt given = to_prompt(prompt);
  with_server([&](server::EmbeddedServer& server) {
    const SamplingParams sampling = to_params(params, kind);
    {
      const std::lock_guard lock(mutex_);
      places_[id] = to.port;
    }
    try {
      server.llm->add_request(id, given, sampling, {.timeout = timeout});
    } catch (...) {
      const std::lock_guard lock(mutex_);
      places_.erase(id);
      throw;
    }
  });
}

void AsyncEngine::abort_request(int64_t id) {
  with_server([id](server::EmbeddedServer& server) { server.llm->abort_request(id); });
}

int64_t AsyncEngine::ask(const PortHandle& to, const std::string& method, const std::string& path,
                         const std::string& body) {
  return with_server([&](server::EmbeddedServer& server) {
    const int64_t id = next_answer_--;
    auto answer = std::make_shared<Answer>(id, to.port);
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(answers_, [](const auto& known) { return known.second.expired(); });
      answers_[id] = answer;
    }
    const size_t end = std::min(path.find('?'), path.size());
    server::HttpRequest request{.method = method,
                                .path = path.substr(0, end),
                                .query = path.substr(std::min(end + 1, path.size())),
                                .headers = {{"content-type", "application/json"}},
                                .body = body,
                                .body_ticket = {}};
    server.handle(std::move(request), std::move(answer));
    return id;
  });
}

void AsyncEngine::abandon(int64_t id) {
  with_server([&](server::EmbeddedServer& server) {
    server.post([this, id] {
      std::shared_ptr<Answer> answer;
      {
        const std::lock_guard lock(mutex_);
        if (const auto known = answers_.find(id); known != answers_.end())
          answer = known->second.lock();
      }
      if (answer) answer->abandon();
    });
  });
}

// On the engine's thread. What is not of generate() is the server's.
void AsyncEngine::deliver(std::vector<RequestOutput>& outputs) {
  std::unordered_map<std::shared_ptr<Port>, std::vector<Port::Event>> news;
  {
    const std::lock_guard lock(mutex_);
    const auto is_ours = [&](RequestOutput& output) {
      const auto known = places_.find(output.request_id);
      if (known == places_.end()) return false;
      const std::shared_ptr<Port> port = known->second;
      if (output.finished) places_.erase(known);
      Port::Event& event = news[port].emplace_back();
      event.id = output.request_id;
      event.is_last = output.finished;
      event.output = std::move(output);
      return true;
    };
    std::erase_if(outputs, is_ours);
  }
  for (auto& [port, events] : news) port->put(std::move(events));
}

void AsyncEngine::reset_prefix_cache() {
  with_server([](server::EmbeddedServer& server) { server.llm->reset_prefix_cache(); });
}
EngineStats AsyncEngine::stats() {
  return with_server([](server::EmbeddedServer& server) { return server.llm->stats(); });
}
bool AsyncEngine::has_failed() {
  return with_server([](server::EmbeddedServer& server) { return !server.llm->failure().empty(); });
}
int64_t AsyncEngine::num_live() {
  return with_server([](server::EmbeddedServer& server) { return server.llm->num_live(); });
}
bool AsyncEngine::drain(double seconds) {
  return with_server([seconds](server::EmbeddedServer& server) {
    server.llm->drain();
    return server.llm->wait_until_idle(seconds);
  });
}

// Outputs that came before exit() can be read after it, but for the texts of candidates.
nb::list AsyncEngine::take(PortHandle& to) {
  const std::shared_lock lock(life_);
  const Tokenizer* tokenizer = server_.llm ? server_.llm->llm().tokenizer() : nullptr;
  nb::list list;
  for (Port::Event& event : to.port->take()) {
    nb::object item;
    if (event.is_answer) {
      const nb::bytes body(event.body.data(), event.body.size());
      item = nb::make_tuple(event.status, event.content_type, body, event.is_last);
    } else {
      item = to_python(event.output, tokenizer, to.known_prompts.insert(event.id).second);
      if (event.is_last) to.known_prompts.erase(event.id);
    }
    list.append(nb::make_tuple(event.id, item, event.is_last));
  }
  return list;
}

void bind_async_engine(nb::module_& m) {
  nb::class_<PortHandle>(m, "Port").def(nb::init<>()).def("fileno", [](const PortHandle& self) {
    return self.port->fileno();
  });
  nb::class_<AsyncEngine> engine(m, "AsyncEngine");
  bind_common(engine);
  engine.def(nb::init<const std::string&, const nb::dict&, const nb::dict&>())
      .def("new_request_id", &AsyncEngine::new_request_id)
      .def("add_request", &AsyncEngine::add_request, nb::arg(), nb::arg(), nb::arg().none(),
           nb::arg(), nb::arg(), nb::arg())
      .def("abort_request", &AsyncEngine::abort_request)
      .def("ask", &AsyncEngine::ask)
      .def("abandon", &AsyncEngine::abandon)
      .def("take", &AsyncEngine::take)
      .def("has_failed", &AsyncEngine::has_failed)
      .def("num_live", &AsyncEngine::num_live)
      .def("drain", &AsyncEngine::drain);
}

}  // namespace nanovllm::python
