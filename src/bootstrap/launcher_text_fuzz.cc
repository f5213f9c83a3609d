// Text that launchers hand over: PMI lines, hexadecimal values (PMI-1, PMIx), Slurm's node lists.
#include <cstdlib>

#include "bootstrap/identity.h"
#include "bootstrap/kv_mpi.h"
#include "bootstrap/pmi1.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace paceline::bootstrap;
  std::string text(reinterpret_cast<const char*>(data), size);
  if (auto words = parse_pmi_line(text); words && !words->contains("cmd")) std::abort();
  if (auto bytes = from_hex(text); bytes && to_hex(*bytes) != text) std::abort();
  if (auto names = expand_nodelist(text, 256); names && names->size() > 256) std::abort();
  return 0;
}
