#include <cstdio>

#include "paceline/comm.h"

int main() {
  std::printf("paceline %s\n", paceline_version());
  return 0;
}
