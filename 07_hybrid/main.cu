#include "../common/chapter.cuh"
#include "train.cuh"

int main(int argc, char** argv) {
  return chapter_main<ch07::Settings>(
      argc, argv,
      {.name = "07_hybrid",
       .title = "a mesh of replicas, stages and shards",
       .train = ch07::train,
       .options = [](auto& settings, Options& options) { mesh_options(settings, options); },
       .refuse = [](const auto& settings, const auto& shape) { refuse_mesh(settings, shape); }});
}
