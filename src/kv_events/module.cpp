// libnanovllm-kv-events.so: events of the prefix cache over ZeroMQ, as vLLM publishes them
// (vllm/distributed/kv_events.py, since its change 42892 of 2026).
//
// PUB: [topic, sequence number, msgpack]. ROUTER, for those who have missed some: a sequence number
// is answered by [number, msgpack] of each batch from it on that is still kept, and by [-1, ""].
// Numbers are 8 bytes, big-endian.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <limits>
#include <mutex>
#include <thread>

#include <nlohmann/json.hpp>
#include <sys/eventfd.h>
#include <unistd.h>
#include <zmq.h>

#include "core/check.h"
#include "core/load_module.h"
#include "kv_events/publisher.h"

namespace nanovllm {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kLingerMs = 500;            // what is under way has this long when the engine goes
constexpr int64_t kMaxRequestBytes = 64;  // of a replay: a number

void zmq_check(bool ok, const char* what, const std::string& endpoint) {
  check(ok, ErrorKind::device, "kv_events_config: {} {}: {}", what, endpoint,
        zmq_strerror(zmq_errno()));
}

/// A part of a message. Copies share its bytes.
class Message {
 public:
  explicit Message(const void* bytes, size_t size) {
    if (zmq_msg_init_size(&message_, size) != 0) throw std::bad_alloc();
    if (size > 0) std::memcpy(zmq_msg_data(&message_), bytes, size);
  }
  Message() { zmq_msg_init(&message_); }
  Message(const Message& other) : Message() { zmq_msg_copy(&message_, &other.message_); }
  Message& operator=(const Message&) = delete;
  ~Message() { zmq_msg_close(&message_); }

  /// Neither of the two kinds of sockets blocks: what a slow peer has no room for is dropped.
  void send(void* socket, int flags) { zmq_msg_send(&message_, socket, flags | ZMQ_DONTWAIT); }
  bool receive(void* socket) { return zmq_msg_recv(&message_, socket, ZMQ_DONTWAIT) >= 0; }
  bool has_more() const { return zmq_msg_more(&message_) != 0; }
  size_t size() const { return zmq_msg_size(&message_); }
  const uint8_t* data() const { return static_cast<const uint8_t*>(zmq_msg_data(&message_)); }

 private:
  mutable zmq_msg_t message_;  // zmq's readers take it without const
};

Message number(uint64_t value) {
  std::array<uint8_t, 8> bytes{};
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<uint8_t>(value >> (56 - 8 * i));
  return Message(bytes.data(), bytes.size());
}

struct CloseSocket {
  void operator()(void* socket) const { zmq_close(socket); }
};
struct EndContext {
  void operator()(void* context) const { zmq_ctx_term(context); }
};
/// Wakes a poll of zmq's: its sockets may be used by one thread alone.
class Bell {
 public:
  Bell() { check(fd_ >= 0, ErrorKind::device, "kv_events_config: no eventfd: error {}", errno); }
  ~Bell() { ::close(fd_); }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  void ring() { ::eventfd_write(fd_, 1); }
  void silence() {
    eventfd_t times = 0;
    ::eventfd_read(fd_, &times);
  }
  int descriptor() const { return fd_; }

 private:
  const int fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
};
using Socket = std::unique_ptr<void, CloseSocket>;

/// vLLM binds where it finds a wildcard, and connects otherwise; this machine's own address is
/// bound, too.
bool is_bound(const std::string& endpoint) {
  const auto begins = [&](const char* prefix) { return endpoint.starts_with(prefix); };
  return endpoint.find('*') != endpoint.npos || endpoint.find("::") != endpoint.npos ||
         begins("ipc://") || begins("tcp://127.0.0.1:");
}

Json to_json(BlockEvent& event, int block_size) {
  switch (event.kind) {
    case BlockEvent::Kind::stored:
      return {{"type", "BlockStored"},
              {"block_hashes", event.hashes},
              {"parent_block_hash", event.parent ? Json(*event.parent) : Json()},
              {"token_ids", event.tokens},
              {"block_size", block_size},
              {"lora_id", nullptr},
              {"medium", "GPU"},  // vLLM's word for the memory that the model reads, on a CPU too
              {"lora_name", nullptr}};
    case BlockEvent::Kind::removed:
      return {{"type", "BlockRemoved"}, {"block_hashes", event.hashes}, {"medium", "GPU"}};
    default:
      return Json::object({{"type", "AllBlocksCleared"}});
  }
}

// The engine's thread queues batches; a thread of its own encodes and sends them, and answers those
// who missed some.
class ZmqPublisher final : public KvEventPublisher {
 public:
  ZmqPublisher(const KvEventsConfig& config, int block_size)
      : config_(config), block_size_(block_size), context_(zmq_ctx_new()) {
    publisher_ = open(ZMQ_PUB, config.endpoint, is_bound(config.endpoint), config.hwm);
    if (!config.replay_endpoint.empty())
      replay_ = open(ZMQ_ROUTER, config.replay_endpoint, true, config.buffer_steps + 2);
    thread_ = std::thread([this] { run(); });
  }
  ~ZmqPublisher() override {
    {
      const std::lock_guard lock(mutex_);
      is_ending_ = true;
    }
    bell_.ring();
    thread_.join();
  }

  void publish(std::vector<BlockEvent> events) override {
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    {
      std::unique_lock lock(mutex_);
      room_.wait(lock, [&] { return std::ssize(queue_) < config_.max_queue_size; });
      queue_.push_back({now.count(), std::move(events)});
    }
    bell_.ring();
  }

  std::string endpoints() const override {
    std::string text = name_of(publisher_);
    if (replay_) text += ", replay " + name_of(replay_);
    return text;
  }

 private:
  struct Batch {
    double time = 0;
    std::vector<BlockEvent> events{};
  };
  struct Sent {
    uint64_t sequence;
    Message payload;
  };

  Socket open(int kind, const std::string& endpoint, bool binds, int64_t most) {
    Socket opened(zmq_socket(context_.get(), kind));
    zmq_check(opened != nullptr, "no socket for", endpoint);
    const auto set = [&](int option, int value) {
      zmq_check(zmq_setsockopt(opened.get(), option, &value, sizeof value) == 0,
                "options are refused for", endpoint);
    };
    set(ZMQ_SNDHWM, static_cast<int>(std::min<int64_t>(most, std::numeric_limits<int>::max())));
    set(ZMQ_LINGER, kLingerMs);
    set(ZMQ_IPV6, endpoint.find('[') != endpoint.npos);
    if (kind == ZMQ_ROUTER)
      zmq_check(zmq_setsockopt(opened.get(), ZMQ_MAXMSGSIZE, &kMaxRequestBytes,
                               sizeof kMaxRequestBytes) == 0,
                "options are refused for", endpoint);
    if (binds)
      zmq_check(zmq_bind(opened.get(), endpoint.c_str()) == 0, "cannot listen on", endpoint);
    else
      zmq_check(zmq_connect(opened.get(), endpoint.c_str()) == 0, "cannot connect to", endpoint);
    return opened;
  }

  static std::string name_of(const Socket& socket) {
    std::array<char, 512> name{};
    size_t size = name.size() - 1;
    zmq_getsockopt(socket.get(), ZMQ_LAST_ENDPOINT, name.data(), &size);
    return name.data();
  }

  void run() {
    std::array<zmq_pollitem_t, 2> items = {
        zmq_pollitem_t{nullptr, bell_.descriptor(), ZMQ_POLLIN, 0},
        zmq_pollitem_t{replay_.get(), 0, ZMQ_POLLIN, 0}};
    for (bool is_ending = false; !is_ending;) {
      zmq_poll(items.data(), replay_ ? 2 : 1, -1);
      bell_.silence();
      std::deque<Batch> batches;
      {
        const std::lock_guard lock(mutex_);
        batches.swap(queue_);
        is_ending = is_ending_;
      }
      room_.notify_one();
      for (Batch& batch : batches) send(batch);
      if (replay_ && items[1].revents) answer_replay();
    }
  }

  void send(Batch& batch) {
    const uint64_t sequence = next_sequence_++;
    try {
      Json events = Json::array();
      for (BlockEvent& event : batch.events) events.push_back(to_json(event, block_size_));
      const auto bytes = Json::to_msgpack(Json::array({batch.time, std::move(events), 0}));
      Message payload(bytes.data(), bytes.size());
      if (replay_) keep(sequence, payload);
      Message(config_.topic.data(), config_.topic.size()).send(publisher_.get(), ZMQ_SNDMORE);
      number(sequence).send(publisher_.get(), ZMQ_SNDMORE);
      payload.send(publisher_.get(), 0);
    } catch (const std::bad_alloc&) {  // its number is missing: subscribers see the gap
    }
  }

  void keep(uint64_t sequence, const Message& payload) {
    while (!sent_.empty() && std::ssize(sent_) >= config_.buffer_steps) sent_.pop_front();
    if (config_.buffer_steps > 0) sent_.push_back({sequence, payload});
  }

  // [client, "", number]. Everything else is ignored.
  void answer_replay() {
    std::deque<Message> parts;
    do {
      if (!parts.emplace_back().receive(replay_.get())) return;
    } while (parts.back().has_more());
    if (parts.size() != 3 || parts[1].size() != 0 || parts[2].size() != 8) return;
    uint64_t first = 0;
    for (size_t i = 0; i < 8; ++i) first = first << 8 | parts[2].data()[i];
    const auto reply = [&](uint64_t sequence, Message payload) {
      Message(parts[0]).send(replay_.get(), ZMQ_SNDMORE);
      Message().send(replay_.get(), ZMQ_SNDMORE);
      number(sequence).send(replay_.get(), ZMQ_SNDMORE);
      payload.send(replay_.get(), 0);
    };
    for (const Sent& sent : sent_)
      if (sent.sequence >= first) reply(sent.sequence, sent.payload);
    reply(~uint64_t{0}, Message());
  }

  const KvEventsConfig config_;
  const int block_size_;
  Bell bell_;
  std::unique_ptr<void, EndContext> context_;  // goes after its sockets
  Socket publisher_, replay_;

  // The thread's own.
  uint64_t next_sequence_ = 0;
  std::deque<Sent> sent_;

  std::mutex mutex_;
  // -- shared
  std::condition_variable room_;
  std::deque<Batch> queue_;
  bool is_ending_ = false;
  // -- shared

  std::thread thread_;
};

}  // namespace
}  // namespace nanovllm

extern "C" __attribute__((visibility("default"))) nanovllm::KvEventPublisher*
nanovllm_open_kv_events(const char* version, const nanovllm::KvEventsConfig& config, int block_size,
                        char* error, size_t error_size) {
  return nanovllm::made_by_module(nanovllm::kKvEventsModuleFile, version, error, error_size, [&] {
    return std::make_unique<nanovllm::ZmqPublisher>(config, block_size);
  });
}

static_assert(std::is_same_v<decltype(nanovllm_open_kv_events), nanovllm::OpenKvEventsFunction>);
