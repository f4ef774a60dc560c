// nanovllm quantize, and the options that quantise and dequantise a model while it is loaded.
#include <filesystem>

#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

class Quantize : public testing::Test {
 protected:
  static std::string answer(const std::string& model, std::vector<std::string> options) {
    options.insert(options.begin(), {"generate", model, "-n", "24", "--temperature", "0",
                                     "--logprobs", "2", "--input", "-"});
    ProcessOptions process;
    process.input = R"({"prompt": "The sky was"})"
                    "\n";
    const auto result = nanovllm_program(options, process);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    if (result.exit_code != 0) return "";
    Json line = result.lines().at(0);
    line.erase("metrics");
    return line.dump();
  }
  TempDirectory directory_;
  const std::string out_ = (directory_.path() / "out").string();
};

TEST_F(Quantize, WritesWhatTheOptionMakes) {
  for (const std::string format : {"fp8", "int8", "int4", "w4a8"}) {
    SCOPED_TRACE(format);
    fs::remove_all(out_);
    const auto written = nanovllm_program({"quantize", demo_model(), out_, "--format", format});
    ASSERT_EQ(written.exit_code, 0) << written.errors;
    EXPECT_EQ(written.output + written.errors, "");
    const std::string here = answer(demo_model(), {"--quantization", format});
    EXPECT_EQ(here, answer(out_, {}));
    const std::string plain =
        answer(out_, {"--quantization", "compressed-tensors", "--dequantize"});
    EXPECT_TRUE(here == plain || format != "int4");  // of others activations are quantised, too
    EXPECT_NE(here, answer(demo_model(), {}));
  }
}

TEST_F(Quantize, SaysWhatItCannotDo) {
  const auto refused = [&](std::vector<std::string> arguments, int code, const char* said) {
    const auto result = nanovllm_program(std::move(arguments));
    EXPECT_EQ(result.exit_code, code) << result.errors;
    EXPECT_NE(result.errors.find(said), std::string::npos) << result.errors;
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    EXPECT_TRUE(fs::is_empty(directory_.path()));
  };
  const std::string quantised = NANOVLLM_SOURCE_DIR "/tests/data/goldens/quantised-packed-128";
  refused({"quantize", demo_model()}, 2, "OUT is missing");
  refused({"quantize", demo_model(), out_}, 2, "--format is missing");
  refused({"quantize", demo_model(), out_, "--format", "int3"}, 2,
          "--format must be one of fp8, int8, int4, w4a8");
  refused({"quantize", quantised, out_, "--format", "fp8"}, 3, "is quantised already, int4");
  refused({"quantize", demo_model(), out_ + "/a/b", "--format", "fp8"}, 2, "cannot be created");
  refused({"inspect", quantised, "--quantization", "fp8"}, 2, "--quantization is \"fp8\", but");
  refused({"inspect", demo_model(), "--quantization", "gptq"}, 2, "--quantization is \"gptq\": a");
}

TEST_F(Quantize, AFullDiskIsNoWrongUsage) {
  const auto result = run_process(
      "/bin/sh", {"-c", R"(ulimit -f 100; exec "$0" "$@")", NANOVLLM_BINARY_DIR "/bin/nanovllm",
                  "quantize", demo_model(), out_, "--format", "int4"});
  EXPECT_EQ(result.exit_code, 1) << result.errors;  // docs/cli.md: results could not be written
  EXPECT_NE(result.errors.find("cannot be written: File too large"), std::string::npos)
      << result.errors;
  EXPECT_TRUE(fs::is_empty(directory_.path()));
}

TEST_F(Quantize, InspectShowsWhatItSaves) {
  const auto bytes = [&](std::vector<std::string> options) {
    options.insert(options.begin(), {"inspect", demo_model(), "--json", "--device", "cpu"});
    ProcessOptions process;
    process.environment = {{"ONEDNN_MAX_CPU_ISA", "AVX2"}};  // where products are our own
    const auto result = nanovllm_program(options, process);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const Json json = Json::parse(result.output);
    EXPECT_EQ(json.contains("quantization"), options.size() > 5) << result.output;
    return json["memory"]["weights"].get<double>();
  };
  const double plain = bytes({}), embeddings = 1536 * 256 * 2;
  EXPECT_NEAR(bytes({"--quantization", "int8"}) - embeddings, (plain - embeddings) / 2,
              0.05 * plain);
  EXPECT_NEAR(bytes({"--quantization", "int4"}) - embeddings, (plain - embeddings) * 0.54 / 2,
              0.05 * plain);
  EXPECT_EQ(bytes({"--quantization", "int4", "--dequantize"}), plain);
}

}  // namespace
}  // namespace nanovllm
