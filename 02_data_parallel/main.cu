#include "../common/chapter.cuh"
#include "train.cuh"

int main(int argc, char** argv) {
  return chapter_main<ch02::Settings>(
      argc, argv,
      {.name = "02_data_parallel",
       .title = "replicas on every GPU, gradients added up while backward goes on",
       .train = ch02::train,
       .tolerance = rounding,
       .options = [](ch02::Settings& s, Options& o) {
         o.integer("bucket-bytes", "N", "all-reduce at least N bytes at once; 0: all, at the end",
                   s.bucket_bytes, int64_t{0}, int64_t{1} << 40);
         o.choice("allreduce", {"nccl", "star"}, "NCCL's, or gather to rank 0 and send out again",
                  s.allreduce);
       }});
}
