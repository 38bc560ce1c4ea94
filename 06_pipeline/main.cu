#include "../common/chapter.cuh"
#include "train.cuh"

int main(int argc, char** argv) {
  return chapter_main<ch06::Settings>(
      argc, argv,
      {.name = "06_pipeline",
       .title = "the pipeline, micro-batches that keep all stages busy",
       .train = ch06::train,
       .options = [](auto& settings, Options& options) { pipeline_options(settings, options); },
       .refuse = [](const auto& settings, const auto& shape) {
         refuse_pipeline(settings, shape, settings.gpus);
       }});
}
