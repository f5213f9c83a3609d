#include "bootstrap/agreement.h"

#include <fmt/format.h>

namespace paceline::bootstrap {

bool every_rank_selects(const Settings& settings) {
  return settings.text("codec") == "topk" && settings.source("codec").starts_with("LIGHT_") &&
         settings.text("algorithm") != "two_level" && settings.text("algorithm") != "sparse";
}

SettingTexts agreed_settings(const Settings& settings) {
  SettingTexts texts;
  for (const char* name : {"codec", "codec_scope", "algorithm", "wire", "wire_threads",
                           "sparse_rows", "node_gather", "node_reduce"})
    texts[name] = settings.text(name);
  for (const char* name : {"inner_size", "hierarchical_threshold", "lanes", "piece_bytes",
                           "topk_threshold", "flows", "node_ctas"}) {
    texts[name] = std::to_string(settings.integer(name));
  }
  for (const char* name : {"topk_ratio", "topk_momentum", "gradient_scale"}) {
    texts[name] = fmt::format("{}", settings.number(name));
  }
  // Where nobody sets them DDP's buckets depend on more.
  for (const char* name : {"fusion_threshold", "fusion_buckets"})
    texts[name] = settings.is_set(name) ? settings.text(name) : "";
  texts["topk_fp16"] = settings.flag("topk_fp16") ? "1" : "0";
  // Not every rank need have said so by the same variable.
  if (every_rank_selects(settings)) texts["codec"] = "topk of every rank";
  return texts;
}

}  // namespace paceline::bootstrap
