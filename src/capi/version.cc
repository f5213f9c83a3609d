#include "base/version.h"
#include "base/status.h"
#include "paceline/comm.h"

extern "C" {

uint32_t paceline_abi_version(void) { return PACELINE_ABI_VERSION; }
const char* paceline_version(void) { return paceline::kVersion; }
const char* paceline_code_name(paceline_code code) {
  return paceline::code_name(static_cast<paceline::Code>(code));
}
}
