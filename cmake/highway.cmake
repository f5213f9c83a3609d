# Highway (SIMD with dispatch at run time) as the target `paceline_highway`.
#
# Debian ships it as a shared library only. A wheel must not depend on that, so PACELINE_HWY_SOURCE_DIR may name an
# unpacked Highway source tree (Debian's source package `highway`): its three run-time files are then built here, static.
set(PACELINE_HWY_SOURCE_DIR "" CACHE PATH "Highway's source tree, to link it statically; empty: the system's library")

if(PACELINE_HWY_SOURCE_DIR)
  if(NOT EXISTS ${PACELINE_HWY_SOURCE_DIR}/hwy/targets.cc)
    message(FATAL_ERROR "PACELINE_HWY_SOURCE_DIR=${PACELINE_HWY_SOURCE_DIR} holds no hwy/targets.cc: name the top of a Highway source tree, or leave it empty to use the system's library (Debian: libhwy-dev)")
  endif()
  add_library(paceline_highway STATIC
    ${PACELINE_HWY_SOURCE_DIR}/hwy/targets.cc
    ${PACELINE_HWY_SOURCE_DIR}/hwy/per_target.cc
    ${PACELINE_HWY_SOURCE_DIR}/hwy/aligned_allocator.cc)
  target_compile_options(paceline_highway PRIVATE -w)
  target_compile_definitions(paceline_highway PUBLIC HWY_STATIC_DEFINE)
  target_include_directories(paceline_highway SYSTEM PUBLIC ${PACELINE_HWY_SOURCE_DIR})
else()
  find_package(hwy CONFIG QUIET)
  if(NOT hwy_FOUND)
    message(FATAL_ERROR "Highway is missing: install libhwy-dev, or set PACELINE_HWY_SOURCE_DIR to its source tree")
  endif()
  add_library(paceline_highway INTERFACE)
  target_link_libraries(paceline_highway INTERFACE hwy::hwy)
endif()
