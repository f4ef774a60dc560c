// Lines of files of every kind of ending, and of pipes that are not ready.
#include "cli/jsonl/line_reader.h"

#include <atomic>
#include <cerrno>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace {
std::atomic<int> interrupted_reads{0};
}

// In place of the C library's: the next `interrupted_reads` calls end as if a signal had come.
extern "C" ssize_t read(int descriptor, void* to, size_t bytes) {
  if (interrupted_reads > 0) {
    --interrupted_reads;
    errno = EINTR;
    return -1;
  }
  return ::syscall(SYS_read, descriptor, to, bytes);
}

namespace nanovllm::cli {
namespace {

using Result = LineReader::Result;

std::vector<std::string> read_all(LineReader& reader) {
  std::vector<std::string> lines;
  for (std::string line;;) {
    const Result result = reader.next(line, true);
    if (result == Result::end_of_file) return lines;
    if (result == Result::not_yet) continue;
    lines.push_back(result == Result::too_long ? "(too long)" : line);
  }
}

TEST(LineReader, SkipsBlankLinesAndNeedsNoLastLineEnd) {
  TempDirectory directory;
  const std::string path = directory.path() / "lines";
  write_file(path, "\xEF\xBB\xBFone\r\n\n  \t\ntwo\nthree");
  LineReader reader("--input", path);
  EXPECT_EQ(reader.count_lines(), 3);
  EXPECT_EQ(read_all(reader), (std::vector<std::string>{"one\r", "two", "three"}));
  EXPECT_EQ(reader.line_number(), 5);
}

TEST(LineReader, LinesAcrossReadsComeWhole) {
  TempDirectory directory;
  const std::string path = directory.path() / "lines";
  const std::string a(300'000, 'a'), b(700'001, 'b');
  write_file(path, a + "\n" + b + "\n" + a);
  LineReader reader("--input", path);
  EXPECT_EQ(read_all(reader), (std::vector<std::string>{a, b, a}));
}

TEST(LineReader, AMonstrousLineIsSkippedAndCounted) {
  TempDirectory directory;
  const std::string path = directory.path() / "lines";
  const std::string monster(LineReader::kMaxLine + 1'000'000, 'x');
  write_file(path, "one\n" + monster + "\ntwo\n" + monster);
  LineReader reader("--input", path);
  EXPECT_EQ(read_all(reader), (std::vector<std::string>{"one", "(too long)", "two", "(too long)"}));
  EXPECT_EQ(reader.line_number(), 4);
}

TEST(LineReader, APipeWithoutALineIsNotWaitedFor) {
  TempDirectory directory;
  const std::string path = directory.path() / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int keep = ::open(path.c_str(), O_RDWR);  // a writer, so that opening does not block
  LineReader reader("--input", path);
  std::string line;
  EXPECT_EQ(reader.next(line, false), Result::not_yet);
  ASSERT_EQ(::write(keep, "ha", 2), 2);
  EXPECT_EQ(reader.next(line, false), Result::not_yet);
  ASSERT_EQ(::write(keep, "lf\n", 3), 3);
  EXPECT_EQ(reader.next(line, false), Result::line);
  EXPECT_EQ(line, "half");
  EXPECT_EQ(reader.count_lines(), -1);
  ::close(keep);
}

TEST(LineReader, ASignalDuringAReadLosesNothing) {
  TempDirectory directory;
  const std::string path = directory.path() / "lines";
  write_file(path, "one\ntwo\n");
  LineReader reader("--input", path);
  interrupted_reads = 3;
  EXPECT_EQ(read_all(reader), (std::vector<std::string>{"one", "two"}));
  EXPECT_EQ(interrupted_reads, 0) << "the reader does not read by read()";
}

TEST(ReadStandardInput, GoesOnAfterASignal) {
  TempDirectory directory;
  const std::string path = directory.path() / "text";
  write_file(path, "a text");
  const int before = ::dup(STDIN_FILENO), file = ::open(path.c_str(), O_RDONLY);
  ASSERT_EQ(::dup2(file, STDIN_FILENO), STDIN_FILENO);
  interrupted_reads = 2;
  EXPECT_EQ(read_standard_input(), "a text");
  EXPECT_EQ(interrupted_reads, 0);
  ::dup2(before, STDIN_FILENO);
  ::close(before);
  ::close(file);
}

}  // namespace
}  // namespace nanovllm::cli
