#include "../common/chapter.cuh"

int main(int argc, char** argv) {
  return chapter_main<ch01::Settings>(argc, argv,
                                      {.name = "01_single_gpu",
                                       .title = "mini-batch SGD on one GPU",
                                       .train = ch01::train,
                                       .tolerance = bit_for_bit});
}
