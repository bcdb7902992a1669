// The tile registers of AMX (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18). There
// are eight, of up to 16 rows of 64 bytes. Their numbers of rows and bytes are configured for all of them at once.
#pragma once

#include "vec.h"

namespace pagewick {
namespace PW_ISA {
namespace {

struct TileShape {
  int64_t rows, row_bytes;
};

// Configures the tile registers of this thread, and releases them in the end.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (is_configured_) _tile_release();
  }

  void configure(const TileShape (&shapes)[8]) {
    struct alignas(64) {
      uint8_t palette, start_row, reserved[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } config = {};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.rows[i] = static_cast<uint8_t>(shapes[i].rows);
      config.row_bytes[i] = static_cast<uint16_t>(shapes[i].row_bytes);
    }
    finish_writes();
    _tile_loadconfig(&config);
    is_configured_ = true;
  }

  bool is_configured() const { return is_configured_; }

  // GCC's intrinsics do not tell the compiler which memory a tile is loaded from: everything must be written before.
  static void finish_writes() { asm volatile("" ::: "memory"); }

 private:
  bool is_configured_ = false;
};

}  // namespace
}  // namespace PW_ISA
}  // namespace pagewick
