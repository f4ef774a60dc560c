// safetensors: the same files are read and refused as by the reference implementation, and damage
// never goes unnoticed.
#include "io/safetensors/safetensors.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "io/json.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

const std::string kData = std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/safetensors/";

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

/// A file image: length, header, data.
std::string image(const std::string& header, size_t data_bytes = 0) {
  std::string file(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(file.data(), &length, 8);
  return file + header + std::string(data_bytes, '\1');
}

std::string refusal(const std::string& file) {
  try {
    parse_safetensors(bytes_of(file), "w.safetensors");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::model);
    EXPECT_EQ(std::string(error.what()).find("w.safetensors: "), 0u) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  return "accepted";
}

void expect_refused(const std::string& file, std::string_view part) {
  const std::string message = refusal(file);
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

std::string entry(const char* dtype, const char* shape, const char* offsets) {
  return std::string(R"({"dtype":")") + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
         offsets + "}";
}

std::string decode_base64(std::string_view text) {
  static constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int held = 0;
  for (const char c : text) {
    if (c == '=') break;
    bits = (bits << 6) | static_cast<uint32_t>(kDigits.find(c));
    if ((held += 6) >= 8) bytes.push_back(static_cast<char>((bits >> (held -= 8)) & 0xffu));
  }
  return bytes;
}

double element(const Tensor& tensor, int64_t i) {
  switch (tensor.dtype) {
    case DType::f32:
      return tensor.ptr<float>()[i];
    case DType::f16:
      return static_cast<float>(tensor.ptr<f16>()[i]);
    case DType::bf16:
      return static_cast<float>(tensor.ptr<bf16>()[i]);
    default:
      return NAN;
  }
}

std::map<std::string, const StoredTensor*> by_name(const std::vector<StoredTensor>& tensors) {
  std::map<std::string, const StoredTensor*> map;
  for (const StoredTensor& tensor : tensors) map[tensor.name] = &tensor;
  return map;
}

std::string file_bytes(const std::string& path) { return read_file(path, 1 << 20); }

TEST(Safetensors, ReadsWhatTheReferenceImplementationWrote) {
  const SafetensorsFile file(kData + "mixed.safetensors");
  const auto tensors = by_name(file.tensors());
  EXPECT_EQ(tensors.size(), 10u);
  EXPECT_EQ(file.metadata().size(), 2u);
  const Json expected = read_json_file(kData + "values.json");
  for (const char* name : {"f32", "f16", "bf16", "four", "special", "empty"}) {
    const Tensor view = tensors.at(name)->view();
    const Json& values = expected.at(name).at("values");
    ASSERT_EQ(Json(tensors.at(name)->shape), expected.at(name).at("shape")) << name;
    ASSERT_EQ(view.numel(), static_cast<int64_t>(values.size())) << name;
    EXPECT_TRUE(view.contiguous()) << name;
    for (int64_t i = 0; i < view.numel(); ++i) {
      const double value = std::stod(values[static_cast<size_t>(i)].get<std::string>());
      EXPECT_EQ(element(view, i), value) << name << " " << i;
      EXPECT_EQ(std::signbit(element(view, i)), std::signbit(value)) << name << " " << i;
    }
  }
  EXPECT_EQ(tensors.at("bf16")->describe(), "BF16[2, 3, 4]");
  EXPECT_EQ(tensors.at("ids")->dtype, "I64");
  EXPECT_EQ(tensors.at("mask")->dtype, "BOOL");
  EXPECT_TRUE(tensors.at("scalar")->shape.empty());
  EXPECT_EQ(tensors.at("scalar")->data.size(), 4u);
}

TEST(Safetensors, AgreesWithTheReferenceImplementationAboutDamagedFiles) {
  const Json verdicts = read_json_file(kData + "verdicts.json");
  ASSERT_GE(verdicts.size(), 700u);
  int accepted = 0;
  for (const Json& verdict : verdicts) {
    const std::string file = decode_base64(verdict.at("file").get<std::string>());
    const std::string message = refusal(file);
    if (message == "accepted") {
      ++accepted;
      EXPECT_TRUE(verdict.at("accepted").get<bool>()) << verdict.at("file");
    } else if (verdict.at("accepted").get<bool>()) {
      // Where we are stricter, knowingly.
      EXPECT_TRUE(message.find("duplicate key") != message.npos ||
                  message.find("does not start with") != message.npos)
          << message << "\n"
          << verdict.at("file");
    }
  }
  EXPECT_GT(accepted, 30);
}

TEST(Safetensors, NamesFileAndHeaderLength) {
  for (size_t size = 0; size < 8; ++size)
    expect_refused(std::string(size, '\0'), "too short for a safetensors file");
  std::string file = image("{}");
  file[1] = 1;
  expect_refused(file, "header length 258, but the file has only 10 bytes");
  const uint64_t over = 100'000'001, most = ~uint64_t{0};
  std::memcpy(file.data(), &over, 8);
  expect_refused(file, "header length 100000001 exceeds the format's limit of 100000000");
  std::memcpy(file.data(), &most, 8);
  expect_refused(file, "header length 18446744073709551615 exceeds");
  expect_refused("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n",
                 "is a Git LFS pointer, not the weights");
  expect_refused(image(""), "does not start with '{'");
  expect_refused(image(" {}"), "does not start with '{'");
  expect_refused(image("{\"\xff\":1}"), "not valid JSON at byte");
}

TEST(Safetensors, NamesTheTensorAndTheNumbers) {
  const std::string a = "{\"a\":" + entry("F32", "[2]", "[0,8]");
  expect_refused(image(a + ",\"a\":" + entry("F32", "[2]", "[0,8]") + "}", 8),
                 "duplicate key \"a\"");
  expect_refused(image("{\"a\":" + entry("F99", "[2]", "[0,8]") + "}", 8),
                 R"(tensor "a" has the unknown dtype "F99")");
  expect_refused(image("{\"a\":" + entry("F32", "[2]", "[8,0]") + "}", 8),
                 R"(tensor "a": data_offsets [8, 0] are reversed)");
  expect_refused(image("{\"a\":" + entry("F32", "[3]", "[0,8]") + "}", 8),
                 R"(tensor "a": F32[3] needs 12 bytes, data_offsets [0, 8] span 8)");
  expect_refused(image("{\"a\":" + entry("F32", "[4611686018427387904,4]", "[0,8]") + "}", 8),
                 "overflows");
  expect_refused(image("{\"a\":" + entry("F32", "[2305843009213693952]", "[0,8]") + "}", 8),
                 "overflows");
  expect_refused(image("{\"a\":" + entry("F4", "[3]", "[0,2]") + "}", 2),
                 "does not fill whole bytes");
  expect_refused(
      image(a + ",\"b\":" + entry("F32", "[2]", "[12,20]") + "}", 20),
      R"(tensor "b" begins at byte 12 of the data, the one before it ends at 8: a hole)");
  expect_refused(image(a + ",\"b\":" + entry("F32", "[2]", "[4,12]") + "}", 12), "they overlap");
  const size_t header = a.size() + 1 + 8;
  expect_refused(image(a + "}", 7), fmt::format("expected {} bytes, file has {}: it is truncated",
                                                header + 8, header + 7));
  expect_refused(image(a + "}", 9), fmt::format("expected {} bytes, file has {}: data follows",
                                                header + 8, header + 9));
  expect_refused(image("{\"a\":3}"), R"(tensor "a" must be an object)");
  expect_refused(image(R"({"a":{"dtype":"F32","shape":[]}})"), R"(tensor "a" has no data_offsets)");
  expect_refused(image(R"({"__metadata__":{"k":1}})"), R"(__metadata__ "k" must be a string)");
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const std::string file = file_bytes(kData + "mixed.safetensors");
  for (size_t size = 0; size < file.size(); ++size)
    EXPECT_NE(refusal(file.substr(0, size)), "accepted") << size;
}

TEST(Safetensors, EveryFlippedHeaderBitIsRefusedOrKeepsTheLayout) {
  const std::string file = file_bytes(kData + "mixed.safetensors");
  const auto original = parse_safetensors(bytes_of(file), "original").tensors;
  uint64_t header = 0;
  std::memcpy(&header, file.data(), 8);
  int accepted = 0;
  for (size_t bit = 0; bit < (8 + header) * 8; ++bit) {
    std::string flipped = file;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    if (refusal(flipped) != "accepted") continue;
    ++accepted;
    // A file that still parses differs in a name, in a dtype of equal size or in how one size is
    // split, never in the bytes.
    const auto tensors = parse_safetensors(bytes_of(flipped), "flipped").tensors;
    ASSERT_EQ(tensors.size(), original.size());
    for (size_t i = 0; i < tensors.size(); ++i)
      EXPECT_EQ(tensors[i].data.size(), original[i].data.size());
  }
  EXPECT_GT(accepted, 0);
}

TEST(Safetensors, RefusesToViewWhatModelsAreNotLoadedFrom) {
  const std::string file =
      image("{\"a\":" + entry("I64", "[1]", "[0,8]") + ",\"s\":" + entry("F32", "[]", "[8,12]") +
                ",\"five\":" + entry("F32", "[1,1,1,1,1]", "[12,16]") +
                ",\"none\":" + entry("F32", "[9223372036854775807,2,0]", "[16,16]") + "}",
            16);
  const auto message = [](const StoredTensor& tensor) -> std::string {
    try {
      tensor.view();
    } catch (const Error& error) {
      return error.what();
    }
    return "viewed";
  };
  const SafetensorsContents contents = parse_safetensors(bytes_of(file), "w");
  const auto tensors = by_name(contents.tensors);
  EXPECT_EQ(message(*tensors.at("a")),
            "tensor \"a\" is I64: only F32, F16 and BF16 weights are supported");
  EXPECT_EQ(message(*tensors.at("s")),
            "tensor \"s\" is F32[]: weights of 1 to 4 dimensions are supported");
  EXPECT_EQ(message(*tensors.at("five")),
            "tensor \"five\" is F32[1, 1, 1, 1, 1]: weights of 1 to 4 dimensions are supported");
  EXPECT_EQ(message(*tensors.at("none")),
            "tensor \"none\": F32[9223372036854775807, 2, 0] overflows");
}

class SafetensorsOnDisk : public testing::Test {
 protected:
  void write(const std::string& file) { std::ofstream(path_, std::ios::binary) << file; }
  TempDirectory temp_;
  std::filesystem::path directory_ = temp_.path();
  std::string path_ = directory_ / "model.safetensors";
};

TEST_F(SafetensorsOnDisk, MisalignedTensorsAreReadable) {
  // A header of odd length puts every f32 at an odd address.
  std::string file = image("{\"a\":" + entry("F32", "[2]", "[0,8]") + "}", 0);
  while (file.size() % 2 == 0) file = image(file.substr(8) + " ");
  const float values[2] = {1.5f, -2.25f};
  file.append(reinterpret_cast<const char*>(values), sizeof values);
  write(file);
  const SafetensorsFile on_disk(path_);
  const Tensor view = on_disk.tensors()[0].view();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % 4, 0u);
  EXPECT_EQ(view.ptr<float>()[0], 1.5f);
  EXPECT_EQ(view.ptr<float>()[1], -2.25f);
  on_disk.release(on_disk.tensors()[0]);
  EXPECT_EQ(view.ptr<float>()[1], -2.25f);
}

TEST_F(SafetensorsOnDisk, ReleasedPagesComeBackUnchanged) {
  write(image("{\"a\":" + entry("F32", "[262144]", "[0,1048576]") + "}", 1 << 20));
  const SafetensorsFile file(path_);
  const StoredTensor& tensor = file.tensors()[0];
  const auto is_one = [](std::byte b) { return b == std::byte{1}; };
  EXPECT_TRUE(std::all_of(tensor.data.begin(), tensor.data.end(), is_one));
  file.release(tensor);
  EXPECT_TRUE(std::all_of(tensor.data.begin(), tensor.data.end(), is_one));
}

TEST_F(SafetensorsOnDisk, NoticesAFileThatChangesWhileItIsLoaded) {
  write(image("{\"a\":" + entry("F32", "[2]", "[0,8]") + "}", 8));
  const SafetensorsFile file(path_);
  EXPECT_NO_THROW(file.check_unchanged());
  // Of the same size, but of another time.
  std::filesystem::last_write_time(
      path_, std::filesystem::last_write_time(path_) + std::chrono::seconds(2));
  EXPECT_THROW(file.check_unchanged(), Error);
  const SafetensorsFile longer(path_);
  EXPECT_NO_THROW(longer.check_unchanged());
  std::filesystem::resize_file(path_, 20);
  EXPECT_THROW(longer.check_unchanged(), Error);
}

TEST_F(SafetensorsOnDisk, AnEmptyFileAndADirectoryAreRefusedByPath) {
  write("");
  EXPECT_THROW(SafetensorsFile{path_}, Error);
  EXPECT_THROW(SafetensorsFile{directory_.string()}, Error);
}

}  // namespace
}  // namespace nanovllm
