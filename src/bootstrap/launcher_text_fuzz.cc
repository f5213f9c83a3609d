// Text that launchers hand over: PMI lines, hexadecimal values (PMI-1, PMIx), Slurm's node lists and tasks.
#include "base/testing/fuzz_input.h"
#include "bootstrap/identity.h"
#include "bootstrap/kv_mpi.h"
#include "bootstrap/pmi1.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  using paceline::testing::require;
  std::string text(reinterpret_cast<const char*>(data), size);
  if (auto words = parse_pmi_line(text); words) {
    require(words->contains("cmd"));
    for (const auto& [name, value] : *words)
      require(text.find(std::string(name).append("=").append(value)) != std::string::npos);
  }
  if (auto bytes = from_hex(text); bytes) require(to_hex(*bytes) == text);
  auto back = from_hex(to_hex(text));
  require(back.is_ok() && *back == text);
  if (auto tasks = tasks_on_node(text, 3); tasks) require(*tasks >= 0);
  if (auto names = expand_nodelist(text, 256); names) {
    require(!names->empty() && names->size() <= 256);
    for (const auto& name : *names)
      require(!name.empty() && name.find_first_of("[],") == std::string::npos);
    // Each name is a list of one.
    for (const auto& name : *names) {
      auto alone = expand_nodelist(name, 1);
      require(alone.is_ok() && alone->size() == 1 && alone->front() == name);
    }
  }
  return 0;
}
