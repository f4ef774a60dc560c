#include <charconv>
#include <filesystem>

#include <boost/asio/local/stream_protocol.hpp>
#include <sys/resource.h>
#include <unistd.h>

#include "core/check.h"
#include "server/http/connection.h"

namespace nanovllm::server {
namespace {

using asio::ip::tcp;
using Local = asio::local::stream_protocol;

/// Each connection takes a file descriptor.
void raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);
}

std::unique_ptr<asio::ssl::context> make_tls(const HttpOptions& options) {
  if (options.ssl_certfile.empty() && options.ssl_keyfile.empty()) return nullptr;
  check(!options.ssl_certfile.empty() && !options.ssl_keyfile.empty(), ErrorKind::invalid_argument,
        "TLS needs both --ssl-certfile and --ssl-keyfile");
  auto tls = std::make_unique<asio::ssl::context>(asio::ssl::context::tls_server);
  tls->set_options(asio::ssl::context::default_workarounds | asio::ssl::context::no_tlsv1 |
                   asio::ssl::context::no_tlsv1_1);
  error_code error;
  tls->use_certificate_chain_file(options.ssl_certfile, error);
  check(!error, ErrorKind::invalid_argument, "--ssl-certfile {}: {}", options.ssl_certfile,
        error.message());
  tls->use_private_key_file(options.ssl_keyfile, asio::ssl::context::pem, error);
  check(!error, ErrorKind::invalid_argument, "--ssl-keyfile {}: {}", options.ssl_keyfile,
        error.message());
  return tls;
}

}  // namespace

const std::string* HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers)
    if (key == name) return &value;
  return nullptr;
}

bool is_same_name(std::string_view a, std::string_view b) {
  return boost::beast::iequals({a.data(), a.size()}, {b.data(), b.size()});
}

std::string decode_percents(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned char byte = 0;
    const char* digits = text.data() + i + 1;
    if (text[i] == '%' && text.size() - i > 2 &&
        std::from_chars(digits, digits + 2, byte, 16).ptr == digits + 2) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string without_extra_slashes(std::string_view path) {
  std::string single;
  for (const char c : path)
    if (c != '/' || !single.ends_with('/')) single += c;
  if (single.size() > 1 && single.ends_with('/')) single.pop_back();
  return single;
}

class HttpServer::State : public std::enable_shared_from_this<HttpServer::State> {
 public:
  State(const HttpOptions& options, Handler handler, Admission takes_body)
      : tls_(make_tls(options)), context_(std::make_shared<ConnectionContext>()) {
    context_->options = options;
    context_->handler = std::move(handler);
    context_->takes_body = std::move(takes_body);
    if (!options.listens) return;
    raise_descriptor_limit();
    try {
      if (options.uds.empty())
        listen_tcp();
      else
        listen_local();
    } catch (const boost::system::system_error& error) {
      fail(ErrorKind::invalid_argument, "{} cannot be listened on: {}", address(),
           error.code().message());
    }
  }
  ~State() { stop_accepting(); }

  void run() {
    if (tcp_) accept(*tcp_);
    if (local_) accept(*local_);
    every(std::chrono::milliseconds(500), [this] {
      const auto now = Clock::now();
      for_each_connection([now](ConnectionBase& connection) { connection.check_deadline(now); });
      return true;
    });
    io_.run();
  }

  void every(std::chrono::milliseconds period, std::function<bool()> task) {
    auto timer = std::make_shared<asio::steady_timer>(io_, period);
    timer->async_wait([this, timer, period, task = std::move(task)](error_code error) mutable {
      if (!error && task()) every(period, std::move(task));
    });
  }

  void on_signal(std::function<void(int)> task) {
    if (!signals_) signals_.emplace(io_, SIGINT, SIGTERM);
    signals_->async_wait([this, task = std::move(task)](error_code error, int signal) mutable {
      if (error) return;
      task(signal);
      on_signal(std::move(task));
    });
  }

  bool is_sending_long() const {
    return std::ranges::any_of(context_->connections, [](const auto* connection) {
      return connection->is_sending_long();
    });
  }
  void stop_accepting() {
    error_code ignored;
    context_->is_ending = true;
    if (tcp_) tcp_->close(ignored);
    if (!local_ || !local_->is_open()) return;
    ::unlink(context_->options.uds.c_str());  // first: who finds it closed takes the path over
    local_->close(ignored);
  }
  void stop() {
    stop_accepting();
    error_code ignored;
    if (signals_) signals_->clear(ignored);  // nobody hears of the next: it ends the process
    for_each_connection([](ConnectionBase& connection) { connection.close(); });
    io_.stop();
  }

  std::string address() const {
    const HttpOptions& o = context_->options;
    if (!o.uds.empty()) return "unix:" + o.uds;
    const bool is_v6 = o.host.find(':') != std::string::npos;
    return fmt::format("{}://{}{}{}:{}", tls_ ? "https" : "http", is_v6 ? "[" : "", o.host,
                       is_v6 ? "]" : "", port_ ? port_ : o.port);
  }

  asio::io_context io_{1};
  std::unique_ptr<asio::ssl::context> tls_;
  std::shared_ptr<ConnectionContext> context_;
  int port_ = 0;

 private:
  static constexpr int64_t kMaxRefused = 64;

  /// `visit` may end the connection that it is given, and others.
  template <class Visit>
  void for_each_connection(const Visit& visit) {
    const std::vector<ConnectionBase*> all(context_->connections.begin(),
                                           context_->connections.end());
    for (ConnectionBase* connection : all)
      if (context_->connections.count(connection) > 0) visit(*connection);
  }

  void listen_tcp() {
    const HttpOptions& o = context_->options;
    tcp::resolver resolver(io_);
    const auto found = resolver.resolve(o.host, std::to_string(o.port), tcp::resolver::passive);
    const tcp::endpoint endpoint = found.begin()->endpoint();
    tcp_.emplace(io_, endpoint.protocol());
    tcp_->set_option(asio::socket_base::reuse_address(true));
    tcp_->bind(endpoint);
    tcp_->listen(4096);
    port_ = tcp_->local_endpoint().port();
  }
  void listen_local() {
    const std::string& path = context_->options.uds;
    local_.emplace(io_);
    local_->open();
    // A socket that nobody answers on is left over from a process that was killed.
    Local::socket probe(io_);
    error_code error;
    probe.connect(Local::endpoint(path), error);
    if (error == asio::error::connection_refused && std::filesystem::is_socket(path))
      ::unlink(path.c_str());
    local_->bind(Local::endpoint(path));
    local_->listen(4096);
  }

  template <class Acceptor>
  void accept(Acceptor& acceptor) {
    acceptor.async_accept([this, &acceptor](error_code error, auto socket) {
      if (!acceptor.is_open()) return;
      if (error) {  // no descriptor is free: others will be closed
        return every(std::chrono::milliseconds(100), [this, &acceptor] {
          if (acceptor.is_open()) accept(acceptor);
          return false;
        });
      }
      const int64_t refused = context_->num_refused;
      const auto served = static_cast<int64_t>(context_->connections.size()) - refused;
      context_->is_full = served >= context_->options.max_connections;
      // Some more are told why they are not served.
      if (!context_->is_full || refused < kMaxRefused) begin(std::move(socket));
      accept(acceptor);
    });
  }
  void begin(tcp::socket socket) {
    error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    // A peer that acknowledges nothing for as long as it may not read has gone without a word.
    const auto unheard = static_cast<unsigned>(1000 * context_->options.write_timeout);
    (void)::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_USER_TIMEOUT, &unheard,
                       sizeof unheard);
    if (tls_)
      std::make_shared<Connection<asio::ssl::stream<tcp::socket>>>(
          asio::ssl::stream<tcp::socket>(std::move(socket), *tls_), context_)
          ->start();
    else
      std::make_shared<Connection<tcp::socket>>(std::move(socket), context_)->start();
  }
  void begin(Local::socket socket) {
    std::make_shared<Connection<Local::socket>>(std::move(socket), context_)->start();
  }

  std::optional<tcp::acceptor> tcp_;
  std::optional<Local::acceptor> local_;
  std::optional<asio::signal_set> signals_;
};

HttpServer::HttpServer(const HttpOptions& options, Handler handler, Admission takes_body)
    : state_(std::make_shared<State>(options, std::move(handler), std::move(takes_body))) {}
HttpServer::~HttpServer() = default;
void HttpServer::run() { state_->run(); }
void HttpServer::post(std::function<void()> task) { asio::post(state_->io_, std::move(task)); }
void HttpServer::every(std::chrono::milliseconds period, std::function<bool()> task) {
  state_->every(period, std::move(task));
}
void HttpServer::on_signal(std::function<void(int)> task) { state_->on_signal(std::move(task)); }
bool HttpServer::is_sending_long() const { return state_->is_sending_long(); }
void HttpServer::stop_accepting() { state_->stop_accepting(); }
void HttpServer::stop() { state_->stop(); }
int HttpServer::port() const { return state_->port_; }
std::string HttpServer::address() const { return state_->address(); }

}  // namespace nanovllm::server
