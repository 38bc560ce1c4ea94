// Data files are used exactly as they are, or refused by name.
#include "../common/idx.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "catch.h"
#include "temporary.h"

namespace {

using Bytes = std::string;

Bytes big_endian(uint32_t x) { return {char(x >> 24), char(x >> 16), char(x >> 8), char(x)}; }

Bytes images(uint32_t count, uint32_t rows, uint32_t columns, size_t pixels, char first = 0) {
  Bytes body(pixels, 0);
  for (size_t i = 0; i < pixels; ++i) body[i] = static_cast<char>(first + i);
  return big_endian(0x803) + big_endian(count) + big_endian(rows) + big_endian(columns) + body;
}
Bytes labels(uint32_t count, const Bytes& body) {
  return big_endian(0x801) + big_endian(count) + body;
}

// Three training and two test samples of 2 x 3 pixels, 10 classes.
class Folder : public TemporaryFolder {
 public:
  Folder() {
    write("train-images-idx3-ubyte", images(3, 2, 3, 18, 100));
    write("train-labels-idx1-ubyte", labels(3, {0, 9, 5}));
    write("t10k-images-idx3-ubyte", images(2, 2, 3, 12));
    write("t10k-labels-idx1-ubyte", labels(2, {1, 2}));
  }
  void write(const std::string& name, const Bytes& bytes) const {
    std::ofstream(path(name), std::ios::binary) << bytes;
  }
  void write_gz(const std::string& name, const Bytes& bytes, bool truncated = false) const {
    gzFile file = gzopen(path(name).c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    if (truncated)
      std::filesystem::resize_file(path(name), std::filesystem::file_size(path(name)) - 9);
  }
  void remove(const std::string& name) const { std::filesystem::remove(path(name)); }

  // The message of the refusal; "" if the data is taken.
  std::string refusal(int classes = 10) const {
    try {
      load(name(), classes);
    } catch (const BadInput& e) {
      const std::string message = e.what();
      CHECK(message.find('\n') == std::string::npos);
      CHECK(message.find(name()) == 0);
      return message;
    }
    return "";
  }
  // Refused with all of these words.
  void refused(const std::vector<std::string>& words) const {
    const std::string message = refusal();
    INFO(message);
    for (const std::string& word : words) {
      INFO(word);
      CHECK(message.find(word) != std::string::npos);
    }
  }
};

}  // namespace

TEST_CASE("the embedded digits are read whole") {
  const Data data = load("data/digits", 10);
  CHECK(data.train.size() == 1498);
  CHECK(data.test.size() == 299);
  CHECK(data.train.features == 64);
  CHECK(data.train.pixels.size() == 1498 * 64);
}

TEST_CASE("pixels and labels are those of the file, plain or .gz") {
  Folder folder;
  if (GENERATE(false, true)) {
    folder.remove("train-images-idx3-ubyte");
    folder.remove("t10k-labels-idx1-ubyte");
    folder.write_gz("train-images-idx3-ubyte.gz", images(3, 2, 3, 18, 100));
    folder.write_gz("t10k-labels-idx1-ubyte.gz", labels(2, {1, 2}));
  }
  const Data data = load(folder.name(), 10);
  CHECK(data.train.rows == 2);
  CHECK(data.train.columns == 3);
  CHECK(data.train.features == 6);
  CHECK(data.train.labels == std::vector<int32_t>{0, 9, 5});
  CHECK(data.test.labels == std::vector<int32_t>{1, 2});
  REQUIRE(data.train.pixels.size() == 18);
  CHECK(data.train.pixels.front() == 100);
  CHECK(data.train.pixels.back() == 117);
}

TEST_CASE("a missing file is refused with both names and how it would be right") {
  Folder folder;
  folder.remove("t10k-labels-idx1-ubyte");
  folder.refused({"t10k-labels-idx1-ubyte: no such file", ".gz", "train-images-idx3-ubyte"});
}

TEST_CASE("gzip under a plain name, and anything else under .gz, are refused") {
  Folder folder;
  folder.write_gz("train-images-idx3-ubyte", images(3, 2, 3, 18));
  folder.refused({"looks gzip-compressed (starts 1f 8b); unpack it first"});
  folder.remove("train-images-idx3-ubyte");
  folder.write("train-images-idx3-ubyte.gz", images(3, 2, 3, 18));
  folder.refused({"not gzip-compressed"});
}

TEST_CASE("a truncated or damaged .gz is refused") {
  Folder folder;
  folder.remove("train-images-idx3-ubyte");
  folder.write_gz("train-images-idx3-ubyte.gz", images(3, 20, 30, 1800), true);
  folder.refused({"truncated"});
  folder.write_gz("train-images-idx3-ubyte.gz", images(3, 2, 3, 18));
  std::fstream file(folder.path("train-images-idx3-ubyte.gz"),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-8, std::ios::end);  // the checksum
  file.put('x');
  file.close();
  folder.refused({"cannot be read"});
}

TEST_CASE("a size that the header does not promise is refused with both sizes") {
  Folder folder;
  const char* name = "train-images-idx3-ubyte";
  folder.write(name, "");
  folder.refused({name, "has 0 bytes", "16"});
  folder.write(name, images(3, 2, 3, 0).substr(0, 15));
  folder.refused({name, "has 15 bytes", "16"});
  folder.write(name, images(60000, 2, 3, 600));
  folder.refused({name, "has 616 bytes", "promises 360016"});
  folder.write(name, images(3, 2, 3, 19));
  folder.refused({name, "has 35 bytes", "promises 34"});
  folder.write(name, images(3, 2, 3, 17));
  folder.refused({name, "has 33 bytes", "promises 34"});
  folder.remove(name);
  folder.write_gz("train-images-idx3-ubyte.gz", images(3, 2, 3, 19));
  folder.refused({"train-images-idx3-ubyte.gz", "has 35 bytes", "promises 34"});
}

TEST_CASE("a header of huge sizes is refused before anything is allocated") {
  Folder folder;
  folder.write("train-images-idx3-ubyte", images(0xffffffff, 0xffffffff, 0xffffffff, 18));
  folder.refused({"4294967295 x 4294967295"});
  folder.write("train-images-idx3-ubyte", images(0x7fffffff, 0x7fff, 0xffff, 18));
  folder.refused({"has 34 bytes", "promises"});
  folder.write("train-images-idx3-ubyte", images(0x80000001, 2, 3, 18));
  folder.refused({"2147483649"});
}

TEST_CASE("no samples and images without pixels are refused") {
  Folder folder;
  folder.write("train-images-idx3-ubyte", images(0, 2, 3, 0));
  folder.refused({"0 samples"});
  folder.write("train-images-idx3-ubyte", images(3, 0, 3, 0));
  folder.refused({"0 x 3 pixels, 1 to"});
  folder.write("train-images-idx3-ubyte", images(3, 2, 0, 0));
  folder.refused({"2 x 0 pixels, 1 to"});
}

TEST_CASE("the wrong kind of file is refused with what it starts with") {
  Folder folder;
  folder.write("train-images-idx3-ubyte", labels(3, Bytes(20, 1)));
  folder.refused({"00000801", "00000803"});
  folder.write("train-images-idx3-ubyte", images(3, 2, 3, 18));
  folder.write("train-labels-idx1-ubyte", images(3, 2, 3, 18));
  folder.refused({"train-labels", "00000803", "00000801"});
}

TEST_CASE("labels that do not belong to the images are refused with both counts") {
  Folder folder;
  folder.write("train-labels-idx1-ubyte", labels(2, {0, 1}));
  folder.refused({"train-labels-idx1-ubyte", "2 labels", "3 images"});
}

TEST_CASE("a label out of range is refused with its index and value") {
  Folder folder;
  folder.write("train-labels-idx1-ubyte", labels(3, {0, 10, 5}));
  folder.refused({"label 1 is 10", "--classes 10", "9"});
  folder.write("train-labels-idx1-ubyte", labels(3, {0, 1, '\xff'}));
  folder.refused({"label 2 is 255"});
  Folder right;
  CHECK(right.refusal(10).empty());
  CHECK(right.refusal(5).find("label 1 is 9") != std::string::npos);
}

TEST_CASE("test images of another shape are refused, of equal size too") {
  Folder folder;
  folder.write("t10k-images-idx3-ubyte", images(2, 2, 2, 8));
  folder.refused({"2 x 2", "2 x 3"});
  folder.write("t10k-images-idx3-ubyte", images(2, 1, 3, 6));
  folder.refused({"1 x 3", "2 x 3"});
  folder.write("t10k-images-idx3-ubyte", images(2, 3, 2, 12));
  folder.refused({"3 x 2", "2 x 3"});
}

TEST_CASE("a folder, a device and an unreadable file are refused") {
  Folder folder;
  folder.remove("train-images-idx3-ubyte");
  std::filesystem::create_directory(folder.path("train-images-idx3-ubyte"));
  folder.refused({"not a regular file"});
  std::filesystem::remove(folder.path("train-images-idx3-ubyte"));
  std::filesystem::create_symlink("/dev/zero", folder.path("train-images-idx3-ubyte"));
  folder.refused({"not a regular file"});
  std::filesystem::remove(folder.path("train-images-idx3-ubyte"));
  folder.write("train-images-idx3-ubyte", images(3, 2, 3, 18));
  std::filesystem::permissions(folder.path("train-images-idx3-ubyte"),
                               std::filesystem::perms::none);
  if (geteuid() != 0) folder.refused({"cannot be read", "Permission denied"});
}
