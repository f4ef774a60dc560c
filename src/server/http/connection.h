// Connection: one client, over TCP, TLS or a Unix socket. One read is outstanding at all times,
// also while an answer is made: so a client that goes away is noticed at once.
#pragma once

#include <algorithm>
#include <array>
#include <optional>

#include <boost/asio.hpp>
#include <boost/asio/ssl.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <fmt/format.h>

#include "server/http/context.h"
#include "server/http/error_body.h"
#include "server/http/message.h"

namespace nanovllm::server {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

template <class Stream>
class Connection final : public ConnectionBase,
                         public std::enable_shared_from_this<Connection<Stream>> {
 public:
  Connection(Stream stream, std::shared_ptr<ConnectionContext> context)
      : stream_(std::move(stream)), context_(std::move(context)), is_refused_(context_->is_full) {
    context_->connections.insert(this);
    context_->num_refused += is_refused_;
  }
  ~Connection() override {
    context_->connections.erase(this);
    context_->num_refused -= is_refused_;
  }

  void start() {
    wait_for(Waiting::header, context_->options.header_timeout);
    if constexpr (kIsTls) {
      stream_.async_handshake(asio::ssl::stream_base::server,
                              [self = this->shared_from_this()](error_code error) {
                                if (error) return self->close();
                                self->begin_request();
                              });
    } else {
      begin_request();
    }
  }

  void close() override {
    if (is_closed_) return;
    is_closed_ = true;
    error_code ignored;
    lowest_layer().close(ignored);
    abandon();
  }

  void check_deadline(Clock::time_point now) override {
    if (waiting_ == Waiting::nothing || now < deadline_) return;
    const auto keep = this->shared_from_this();
    if (waiting_ == Waiting::header && buffer_.size() + parsed_ > 0)
      return refuse(408, "the request's head took too long");
    close();
  }

  // The system takes a short one at once.
  bool is_sending_long() const override {
    return is_finishing_ && !is_closed_ && sending_.size() + pending_.size() + body_.size() > 65536;
  }

 private:
  static constexpr size_t kMaxChunks = 65536;  // each costs work, however little it brings
  struct ChunkCounter {
    size_t count = 0;
    void operator()(uint64_t size, boost::beast::string_view, error_code&) { count += size > 0; }
  };
  static constexpr bool kIsTls = !requires(Stream & s) { s.is_open(); };
  enum class Waiting { nothing, idle, header, body, writing, ending };

  // One request of this connection; a later request makes a new one.
  class Reply final : public Exchange {
   public:
    Reply(std::shared_ptr<Connection> connection, bool keep_alive, bool chunked, bool head)
        : connection_(std::move(connection)),
          keep_alive_(keep_alive),
          chunked_(chunked),
          head_(head) {}
    ~Reply() override {
      // A handler that forgets to answer would leave its client waiting for ever.
      if (connection_ && !done_) connection_->close();
    }
    void respond(HttpResponse response) override {
      if (!is_open()) return;
      const bool close = response.close || !keep_alive_ || connection_->context_->is_ending;
      const std::string head = whole_head(response, close);
      finish(head, head_ ? std::string() : std::move(response.body), close);
    }
    void begin_stream(const Headers& headers) override {
      if (!is_open()) return;
      std::string head =
          head_text(200, "text/event-stream; charset=utf-8", headers, !keep_alive_ || !chunked_);
      head += "Cache-Control: no-store\r\nX-Accel-Buffering: no\r\n";
      if (chunked_) head += "Transfer-Encoding: chunked\r\n";
      connection_->streaming_ = true;
      connection_->send(head + "\r\n");
    }
    void write(std::string_view bytes) override {
      if (!is_open() || bytes.empty()) return;
      if (connection_->is_behind()) return connection_->close_later();
      if (!chunked_) return connection_->send(bytes);
      connection_->send(fmt::format("{:x}\r\n", bytes.size()));
      connection_->send(bytes);
      connection_->send("\r\n");
    }
    void end_stream() override {
      if (is_open()) finish(chunked_ ? "0\r\n\r\n" : "", "", !keep_alive_ || !chunked_);
    }
    void on_abandoned(std::function<void()> callback) override {
      if (was_abandoned_) return callback();
      abandoned_ = std::move(callback);
    }

    /// Whether an interim answer may go before this one.
    bool may_be_preceded() const { return chunked_ && !connection_->streaming_; }

    void abandon() {
      done_ = was_abandoned_ = true;
      connection_.reset();
      if (auto callback = std::exchange(abandoned_, nullptr)) callback();
    }

   private:
    bool is_open() const { return connection_ && !done_; }
    void finish(std::string_view bytes, std::string body, bool close) {
      done_ = true;
      abandoned_ = nullptr;
      const auto connection = std::move(connection_);
      connection->finish(bytes, std::move(body), close);
    }

    std::shared_ptr<Connection> connection_;  // null once answered or abandoned
    bool keep_alive_, chunked_, head_, done_ = false, was_abandoned_ = false;
    std::function<void()> abandoned_;
  };

  auto& lowest_layer() {
    if constexpr (kIsTls)
      return stream_.lowest_layer();
    else
      return stream_;
  }

  void wait_for(Waiting what, double seconds) {
    waiting_ = what;
    deadline_ = Clock::now() +
                std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  // -- Reading

  void begin_request() {
    parser_.emplace();
    parser_->header_limit(static_cast<uint32_t>(context_->options.max_header_bytes));
    parser_->body_limit(context_->options.max_body_bytes);
    parser_->eager(false);
    chunks_.count = 0;
    parser_->on_chunk_header(chunks_);
    parsed_ = 0;
    ticket_.reset();
    wait_for(
        buffer_.size() > 0 ? Waiting::header : Waiting::idle,
        buffer_.size() > 0 ? context_->options.header_timeout : context_->options.idle_timeout);
    if (buffer_.size() > 0)
      parse();
    else
      read();
  }

  void read() {
    if (is_reading_ || is_closed_) return;
    is_reading_ = true;
    const size_t room = waiting_ == Waiting::body ? 65536 : 2048;
    stream_.async_read_some(buffer_.prepare(room),
                            [self = this->shared_from_this()](error_code error, size_t bytes) {
                              self->is_reading_ = false;
                              self->on_read(error, bytes);
                            });
  }

  void on_read(error_code error, size_t bytes) {
    if (is_closed_) return;
    buffer_.commit(bytes);
    if (waiting_ == Waiting::ending) {
      buffer_.clear();  // what still comes is thrown away, so that no reset hides the answer
      return error ? close() : read();
    }
    if (error) return on_end_of_input(error);
    if (reply_.lock() || !parser_) return;  // a pipelined request waits for its turn
    if (waiting_ == Waiting::idle) wait_for(Waiting::header, context_->options.header_timeout);
    parse();
  }

  // A client may end its side right behind its request and still wait for the answer; one that does
  // so later has gone. One that has gone at once looks like the first, until something is sent: a
  // 100 that nobody expects is skipped by those who wait, and brings a reset from where nobody is.
  void on_end_of_input(error_code error) {
    const auto reply = reply_.lock();
    if (!reply || error != asio::error::eof ||
        Clock::now() - dispatched_ > std::chrono::milliseconds(100))
      return close();
    closes_after_reply_ = true;
    if (reply->may_be_preceded()) send("HTTP/1.1 100 Continue\r\n\r\n");
    lowest_layer().async_wait(asio::socket_base::wait_error,
                              [self = this->shared_from_this()](error_code failed) {
                                if (!failed) self->close();
                              });
  }

  static bool is_end_of_line(asio::const_buffer bytes) {
    const char c = *static_cast<const char*>(bytes.data());
    return c == '\r' || c == '\n';
  }

  void parse() {
    const auto keep = this->shared_from_this();
    // Some clients send an empty line behind a body.
    while (parsed_ == 0 && buffer_.size() > 0 && is_end_of_line(buffer_.cdata()))
      buffer_.consume(1);
    while (!parser_->is_done()) {
      error_code error;
      const size_t used = parser_->put(buffer_.data(), error);
      buffer_.consume(used);
      parsed_ += used;
      if (error == http::error::need_more) {
        // The parser takes a chunk's head and the trailers whole, as it takes a request's head.
        if (used == 0 && buffer_.size() > context_->options.max_header_bytes)
          return refuse(431, parser_->is_header_done()
                                 ? "a chunk's head or the trailers are too large"
                                 : "the request's head is too large");
        break;
      }
      if (chunks_.count > kMaxChunks)
        return refuse(400, fmt::format("the body has more than {} chunks", kMaxChunks));
      if (error) return refuse(error);
      if (parser_->is_header_done() && waiting_ != Waiting::body) {
        if (!accept_header()) return;
        wait_for(Waiting::body, context_->options.body_timeout);
        parser_->eager(true);
      }
      if (buffer_.size() == 0) break;  // the parser takes an empty buffer in silence
    }
    if (!count_body())
      return refuse(503, "too many request bodies are being read; try again later");
    if (parser_->is_done()) return dispatch();
    if (waiting_ == Waiting::body) wait_for(Waiting::body, context_->options.body_timeout);
    read();
  }

  /// Whether the head is one that we answer, and not without its body.
  bool accept_header() {
    const auto& head = parser_->get();
    if (is_refused_) return refuse(503, "too many connections are open; try again later"), false;
    if (const auto fault = fault_of(head, parser_->chunked(), context_->options))
      return refuse(fault->status, fault->message), false;
    if (!parser_->is_done() && context_->takes_body &&
        !context_->takes_body(request_of(http::request<http::string_body>(head))))
      return dispatch(), false;
    if (const auto expect = head[http::field::expect]; !expect.empty()) {
      if (!boost::beast::iequals(expect, "100-continue"))
        return refuse(417, "only 100-continue may be expected"), false;
      if (!parser_->is_done() && head.version() == 11) send("HTTP/1.1 100 Continue\r\n\r\n");
    }
    return true;
  }

  /// Whether there is room for what of the body has come.
  bool count_body() {
    const size_t size = parser_->get().body().size();
    if (size == 0) return true;
    if (!ticket_) {
      counted_ = std::make_shared<size_t>(0);
      ticket_ = std::shared_ptr<void>(
          nullptr, [all = context_->body_bytes, own = counted_](void*) { *all -= *own; });
    }
    *context_->body_bytes += size - *counted_;
    *counted_ = size;
    // One that is alone may be as large as any, however high --max-body-bytes is.
    const size_t all = *context_->body_bytes;
    return all <= context_->options.max_bodies_bytes || all == size;
  }

  void dispatch() {
    waiting_ = Waiting::nothing;
    const bool is_whole = parser_->is_done();
    auto message = parser_->release();
    parser_.reset();
    const bool keep_alive = is_whole && message.keep_alive(), chunked = message.version() == 11;
    HttpRequest request = request_of(std::move(message));
    request.body_ticket = std::exchange(ticket_, nullptr);
    if (buffer_.size() == 0) buffer_ = {};  // an idle connection keeps little memory
    const auto reply = std::make_shared<Reply>(this->shared_from_this(), keep_alive, chunked,
                                               request.method == "HEAD");
    reply_ = reply;
    dispatched_ = Clock::now();
    // Behind a pipelined request nothing is read: the buffer must not grow while it is parsed.
    if (buffer_.size() == 0 && is_whole) read();
    context_->handler(std::move(request), reply);
  }

  // -- Refusing what is no request

  void refuse(const error_code& error) {
    if (error == http::error::body_limit)
      return refuse(
          413, fmt::format("the body is larger than {} bytes", context_->options.max_body_bytes));
    if (error == http::error::header_limit) return refuse(431, "the request's head is too large");
    if (error == http::error::bad_version) return refuse(505, "HTTP/1.1 is spoken here");
    if (error == http::error::end_of_stream) return close();
    refuse(400, fmt::format("this is no HTTP request: {}", error.message()));
  }
  void refuse(int status, std::string_view message) {
    const HttpResponse response = error_response(status, message);
    parser_.reset();
    ticket_.reset();
    finish(whole_head(response, true), response.body, true);
  }

  // -- Writing

  void send(std::string_view bytes) {
    if (is_closed_) return;
    pending_ += bytes;
    if (is_sending_ || flush_posted_) return;
    // One write for all that this round of the loop adds.
    flush_posted_ = true;
    asio::post(stream_.get_executor(), [self = this->shared_from_this()] {
      self->flush_posted_ = false;
      self->flush();
    });
  }

  /// Whether too much waits for what is being sent. How large one write is, is not the client's
  /// doing: the end of a long stream may have all of its text again.
  bool is_behind() const {
    return is_sending_ && pending_.size() > context_->options.max_output_bytes;
  }
  // The writer still holds the exchange: it must not be ended before the writer is done.
  void close_later() {
    if (std::exchange(is_overflowing_, true)) return;
    asio::post(stream_.get_executor(), [self = this->shared_from_this()] { self->close(); });
  }

  void flush() {
    if (is_sending_ || is_closed_) return;
    if (pending_.empty()) return on_all_sent();
    is_sending_ = true;
    sending_.clear();
    sending_.swap(pending_);
    if (waiting_ == Waiting::nothing || waiting_ == Waiting::writing)
      wait_for(Waiting::writing, context_->options.write_timeout);
    // A reader that takes some of a long answer has time for the rest.
    const auto go_on = [this](error_code error, size_t) -> size_t {
      if (waiting_ == Waiting::writing) wait_for(Waiting::writing, context_->options.write_timeout);
      return error ? 0 : 65536;
    };
    const std::array buffers{asio::buffer(std::as_const(sending_)),
                             asio::buffer(std::as_const(body_))};
    asio::async_write(stream_, buffers, go_on,
                      [self = this->shared_from_this()](error_code error, size_t) {
                        self->is_sending_ = false;
                        if (self->sending_.capacity() > 65536) self->sending_ = {};
                        if (error) return self->close();
                        if (self->waiting_ == Waiting::writing) self->waiting_ = Waiting::nothing;
                        self->flush();
                      });
  }

  // The answer is complete; the next request may begin once it has been sent.
  void finish(std::string_view bytes, std::string body, bool close) {
    is_finishing_ = true;
    streaming_ = false;
    closes_after_reply_ |= close;
    reply_.reset();
    pending_ += bytes;
    body_ = std::move(body);
    flush();
  }

  void on_all_sent() {
    if (!std::exchange(is_finishing_, false)) return;
    body_ = {};
    if (!closes_after_reply_) return begin_request();
    if constexpr (kIsTls) {  // else an answer that the connection's end ends looks cut off
      stream_.async_shutdown([self = this->shared_from_this()](error_code) {});
    } else {
      error_code ignored;
      stream_.shutdown(asio::socket_base::shutdown_send, ignored);
    }
    wait_for(Waiting::ending, 2);
    buffer_.clear();
    read();
  }

  void abandon() {
    if (const auto reply = reply_.lock()) reply->abandon();
  }

  Stream stream_;
  const std::shared_ptr<ConnectionContext> context_;
  const bool is_refused_;  // one too many: its request gets a 503
  ChunkCounter chunks_;
  boost::beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::weak_ptr<Reply> reply_;
  std::shared_ptr<void> ticket_;     // of the body that is being read
  std::shared_ptr<size_t> counted_;  // its bytes
  size_t parsed_ = 0;                // bytes of this request
  std::string pending_, sending_;
  std::string body_;  // of the answer whose head is in either: it may be large, and is not copied
  Clock::time_point deadline_, dispatched_;
  Waiting waiting_ = Waiting::nothing;
  bool is_overflowing_ = false, is_reading_ = false, is_sending_ = false, flush_posted_ = false,
       streaming_ = false, is_finishing_ = false, closes_after_reply_ = false, is_closed_ = false;
};

}  // namespace nanovllm::server
