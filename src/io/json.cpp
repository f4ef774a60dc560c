#include "io/json.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "core/check.h"

namespace nanovllm {
namespace {

/// A pointer that also reports how far the parser has read: SAX callbacks carry no position of
/// their own.
class TrackingIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackingIterator() = default;
  TrackingIterator(const char* at, const char** furthest) : at_(at), furthest_(furthest) {}
  reference operator*() const { return *at_; }
  TrackingIterator& operator++() {
    *furthest_ = ++at_;
    return *this;
  }
  TrackingIterator operator++(int) {
    TrackingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TrackingIterator& other) const { return at_ == other.at_; }

 private:
  const char* at_ = nullptr;
  const char** furthest_ = nullptr;
};

/// Shortens a parser's message to what is wrong, as one line of printable ASCII: it may quote the
/// input.
std::string plain_reason(std::string_view message) {
  if (const size_t column = message.find(", column "); column != message.npos) {
    if (const size_t colon = message.find(": ", column); colon != message.npos)
      message.remove_prefix(colon + 2);
  } else if (const size_t bracket = message.find("] "); bracket != message.npos) {
    message.remove_prefix(bracket + 2);
  }
  constexpr size_t kLongest = 200;
  std::string reason(message.substr(0, kLongest));
  for (char& c : reason) c = c >= ' ' && c <= '~' ? c : '?';
  return message.size() > kLongest ? reason + "..." : reason;
}

/// Collects finished values on one stack; a container takes its children from the top when it
/// closes. That way each object is allocated once, at its final size, and nothing is searched:
/// ordered_json's own insertion looks through all keys and copies all children when it grows.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view text, std::string_view what, ErrorKind kind, const JsonLimits& limits)
      : begin_(text.data()), furthest_(text.data()), what_(what), kind_(kind), limits_(limits) {}

  const char** furthest() { return &furthest_; }
  Json take() { return std::move(values_.front()); }

  bool null() override { return add(Json(nullptr)); }
  bool boolean(bool value) override { return add(Json(value)); }
  bool number_integer(number_integer_t value) override { return add(Json(value)); }
  bool number_unsigned(number_unsigned_t value) override { return add(Json(value)); }
  bool number_float(number_float_t value, const string_t&) override { return add(Json(value)); }
  bool string(string_t& value) override { return add(Json(std::move(value))); }
  bool binary(binary_t&) override { return false; }  // not part of JSON text

  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }

  bool key(string_t& name) override {
    keys_.push_back({std::move(name), offset()});
    return true;
  }

  bool end_object() override {
    const Frame frame = close();
    refuse_duplicates(frame.first_key);
    Json object = Json::object();
    auto& members = object.get_ref<Json::object_t&>();
    members.reserve(values_.size() - frame.first_value);
    for (size_t i = frame.first_value, k = frame.first_key; i < values_.size(); ++i, ++k)
      static_cast<Json::object_t::Container&>(members).emplace_back(std::move(keys_[k].name),
                                                                    std::move(values_[i]));
    values_.resize(frame.first_value);
    keys_.resize(frame.first_key);
    return add(std::move(object));
  }

  bool end_array() override {
    const Frame frame = close();
    const auto first = values_.begin() + static_cast<std::ptrdiff_t>(frame.first_value);
    Json array = Json::array();
    array.get_ref<Json::array_t&>().assign(std::make_move_iterator(first),
                                           std::make_move_iterator(values_.end()));
    values_.resize(frame.first_value);
    return add(std::move(array));
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    fail(kind_, "{}: not valid JSON at byte {}: {}", what_, position == 0 ? 0 : position - 1,
         plain_reason(error.what()));
  }

 private:
  struct Key {
    std::string name;
    size_t offset;
  };
  struct Frame {
    size_t first_value, first_key;
  };

  size_t offset() const {
    const auto read = static_cast<size_t>(furthest_ - begin_);
    return read == 0 ? 0 : read - 1;
  }

  bool add(Json&& value) {
    if (++nodes_ > limits_.max_nodes)
      fail(kind_, "{}: more than {} JSON values (at byte {})", what_, limits_.max_nodes, offset());
    values_.push_back(std::move(value));
    return true;
  }

  bool open() {
    if (frames_.size() >= limits_.max_depth)
      fail(kind_, "{}: JSON nested more than {} levels deep (at byte {})", what_, limits_.max_depth,
           offset());
    frames_.push_back({values_.size(), keys_.size()});
    return true;
  }

  Frame close() {
    const Frame frame = frames_.back();
    frames_.pop_back();
    return frame;
  }

  /// Sorts by hash, then text: n log n whatever the keys are, so chosen hash collisions gain
  /// nothing.
  void refuse_duplicates(size_t first_key) {
    const size_t count = keys_.size() - first_key;
    if (count < 2) return;
    order_.clear();
    for (size_t i = first_key; i < keys_.size(); ++i)
      order_.emplace_back(std::hash<std::string_view>{}(keys_[i].name), i);
    std::sort(order_.begin(), order_.end(), [this](const auto& a, const auto& b) {
      if (a.first != b.first) return a.first < b.first;
      const int order = keys_[a.second].name.compare(keys_[b.second].name);
      return order != 0 ? order < 0 : a.second < b.second;
    });
    const auto twice =
        std::adjacent_find(order_.begin(), order_.end(), [this](const auto& a, const auto& b) {
          return a.first == b.first && keys_[a.second].name == keys_[b.second].name;
        });
    if (twice == order_.end()) return;
    const Key& key = keys_[std::next(twice)->second];
    fail(kind_, "{}: duplicate key {} in a JSON object (at byte {})", what_, quote(key.name),
         key.offset);
  }

  const char* begin_;
  const char* furthest_;
  std::string_view what_;
  ErrorKind kind_;
  JsonLimits limits_;
  size_t nodes_ = 0;
  std::vector<Json> values_;
  std::vector<Key> keys_;
  std::vector<Frame> frames_;
  std::vector<std::pair<size_t, size_t>> order_;  // scratch of refuse_duplicates
};

/// A file descriptor that closes itself.
class FileDescriptor {
 public:
  explicit FileDescriptor(const std::string& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

}  // namespace

std::string dump_json(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 80;
  const bool cut = text.size() > kLongest;
  // ensure_ascii and `replace` make any bytes one printable line.
  std::string line = Json(std::string(text.substr(0, kLongest)))
                         .dump(-1, ' ', true, Json::error_handler_t::replace);
  return cut ? line + "..." : line;
}

Json parse_json(std::string_view text, std::string_view what, ErrorKind kind,
                const JsonLimits& limits) {
  check(text.size() <= limits.max_bytes, kind, "{}: {} bytes of JSON, more than the limit of {}",
        what, text.size(), limits.max_bytes);
  // The lexer takes a zero byte for the end of the text and would ignore what follows it.
  if (const size_t zero = text.find('\0'); zero != text.npos)
    fail(kind, "{}: not valid JSON at byte {}: zero byte", what, zero);
  Builder builder(text, what, kind, limits);
  const TrackingIterator first(text.data(), builder.furthest());
  const TrackingIterator last(text.data() + text.size(), builder.furthest());
  const bool complete =
      Json::sax_parse(first, last, &builder, nlohmann::detail::input_format_t::json,
                      /*strict=*/true, /*ignore_comments=*/false);
  check(complete, kind, "{}: not valid JSON", what);
  return builder.take();
}

Json read_json_file(const std::string& path, const JsonLimits& limits) {
  return parse_json(read_file(path, limits.max_bytes), path, ErrorKind::model, limits);
}

void append_json(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else {
      out += fmt::format("\\u{:04x}", static_cast<unsigned char>(c));
    }
  }
  out += '"';
}

std::string read_file(const std::string& path, size_t max_bytes) {
  const auto reason = [] { return std::string(std::strerror(errno)); };
  struct stat status {};
  // stat before open: opening a pipe would wait for its writer.
  if (::stat(path.c_str(), &status) != 0)
    fail(ErrorKind::model, "{}: cannot be read: {}", path, reason());
  check(!S_ISDIR(status.st_mode), ErrorKind::model, "{}: is a directory, expected a file", path);
  check(S_ISREG(status.st_mode), ErrorKind::model, "{}: is not a regular file", path);
  const auto size = static_cast<size_t>(status.st_size);
  check(size <= max_bytes, ErrorKind::model, "{}: {} bytes, more than the limit of {}", path, size,
        max_bytes);

  const FileDescriptor file(path);
  if (file.get() < 0) fail(ErrorKind::model, "{}: cannot be read: {}", path, reason());
  std::string bytes(size, '\0');
  size_t filled = 0;
  while (filled < size) {
    const ssize_t count = ::read(file.get(), bytes.data() + filled, size - filled);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(ErrorKind::model, "{}: cannot be read: {}", path, reason());
    check(count > 0, ErrorKind::model,
          "{}: ended after {} of {} bytes: it changed while it was read", path, filled, size);
    filled += static_cast<size_t>(count);
  }
  return bytes;
}

}  // namespace nanovllm
