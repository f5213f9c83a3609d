#include "bootstrap/agreement.h"

#include <fmt/format.h>

namespace paceline::bootstrap {

SettingTexts agreed_settings(const Settings& settings) {
  SettingTexts texts;
  for (const char* name :
       {"codec", "codec_scope", "algorithm", "wire", "wire_threads", "sparse_rows"})
    texts[name] = settings.text(name);
  for (const char* name : {"inner_size", "hierarchical_threshold", "lanes", "piece_bytes",
                           "topk_threshold", "flows", "node_ctas"}) {
    texts[name] = std::to_string(settings.integer(name));
  }
  for (const char* name : {"topk_ratio", "gradient_scale"}) {
    texts[name] = fmt::format("{}", settings.number(name));
  }
  texts["topk_fp16"] = settings.flag("topk_fp16") ? "1" : "0";
  return texts;
}

}  // namespace paceline::bootstrap
