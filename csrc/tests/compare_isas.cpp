// Runs every op under each instruction set of this CPU and compares with the scalar build. Needs no Python, so a
// cross-compiled library can be checked under an emulator: the scalar build is checked by tests/kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "pagedserve.h"

namespace {

using Floats = std::vector<float>;

// Numbers in [-2, 2), the same on every machine.
Floats numbers(size_t count, uint32_t seed) {
  Floats result(count);
  for (float& x : result) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(seed >> 8) / (1 << 22) - 2.f;
  }
  return result;
}

void check(int status) {
  if (status == PS_OK) return;
  std::printf("status %d: %s\n", status, ps_last_error());
  std::exit(1);
}

struct Case {
  const char* name;
  Floats (*run)();
};

Floats rms_norm() {
  constexpr int64_t kRows = 5, kDim = 103;
  Floats x = numbers(kRows * kDim, 1), residual = numbers(kRows * kDim, 2), out(kRows * kDim, NAN);
  const Floats weight = numbers(kDim, 3);
  check(ps_rms_norm(out.data(), kDim, kDim, x.data(), kDim, kDim, residual.data(), kDim, weight.data(), kRows, 1, kDim,
                    1e-5f));
  out.insert(out.end(), residual.begin(), residual.end());
  return out;
}

Floats rotary_embedding() {
  constexpr int64_t kTokens = 3, kHeads = 2, kHeadDim = 24, kRotaryDim = 18;
  Floats query = numbers(kTokens * kHeads * kHeadDim, 4);
  const Floats cos_sin = numbers(10 * kRotaryDim, 5);
  const int64_t positions[] = {9, 0, 4};
  check(ps_rotary_embedding(positions, query.data(), kHeads * kHeadDim, kHeads, nullptr, 0, 0, cos_sin.data(), 10,
                            kTokens, kHeadDim, kRotaryDim));
  return query;
}

template <int kActivation>
Floats activation() {
  constexpr int64_t kRows = 2, kDim = 37;
  Floats x = numbers(kRows * 2 * kDim, 6), out(kRows * kDim, NAN);
  x[0] = 100.f;
  x[1] = -100.f;
  check(ps_gated_activation(kActivation, out.data(), kDim, x.data(), 2 * kDim, kRows, kDim));
  return out;
}

Floats layer_norm() {
  constexpr int64_t kRows = 5, kDim = 103;
  Floats x = numbers(kRows * kDim, 1), residual = numbers(kRows * kDim, 2), out(kRows * kDim, NAN);
  const Floats weight = numbers(kDim, 3), bias = numbers(kDim, 4);
  check(ps_layer_norm(out.data(), kDim, x.data(), kDim, residual.data(), kDim, weight.data(), bias.data(), kRows, kDim,
                      1e-5f));
  out.insert(out.end(), residual.begin(), residual.end());
  return out;
}

// Plain activation, scale, soft cap and add, one after another; then rows of a table of 16-bit floats.
Floats elementwise() {
  constexpr int64_t kRows = 3, kDim = 37;
  Floats x = numbers(kRows * kDim, 5);
  const Floats y = numbers(kRows * kDim, 6);
  check(ps_activation(PS_RELU, x.data(), kDim, x.data(), kDim, kRows, kDim));
  check(ps_scale(x.data(), kDim, kRows, kDim, 3.f));
  check(ps_soft_cap(x.data(), kDim, kRows, kDim, 2.f));
  check(ps_add(x.data(), kDim, y.data(), kDim, kRows, kDim));
  std::vector<uint16_t> table(4 * kDim);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint16_t>(0x3c00 + 7 * i);
  const int64_t ids[] = {3, 0};
  for (const int dtype : {PS_BF16, PS_F16}) {
    Floats rows(2 * kDim, NAN);
    check(ps_embedding(rows.data(), kDim, table.data(), kDim, 4, dtype, ids, 2, kDim));
    x.insert(x.end(), rows.begin(), rows.end());
  }
  return x;
}

template <int kDtype, int kBlockSize>
Floats attention() {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kHeadDim = 40, kSeqLen = 70, kQueryLen = 9;
  constexpr int64_t kNumBlocks = (kSeqLen + kBlockSize - 1) / kBlockSize;
  constexpr int64_t kBlockElements = 2 * kKvHeads * kBlockSize * (kHeadDim + (kDtype == PS_I8 ? 4 : 0));
  constexpr int64_t kElementBytes = kDtype == PS_F32 ? 4 : kDtype == PS_I8 ? 1 : 2;
  std::vector<uint8_t> pool(kNumBlocks * kBlockElements * kElementBytes, 0xff);
  const ps_kv_cache kv_cache{pool.data(), kBlockElements, kNumBlocks, kKvHeads, kHeadDim, kBlockSize, kDtype};
  std::vector<int32_t> table(kNumBlocks);
  std::vector<int64_t> slots(kSeqLen);
  for (int64_t i = 0; i < kNumBlocks; ++i) table[i] = static_cast<int32_t>(kNumBlocks - 1 - i);
  for (int64_t i = 0; i < kSeqLen; ++i) slots[i] = table[i / kBlockSize] * int64_t{kBlockSize} + i % kBlockSize;
  const Floats key = numbers(kSeqLen * kKvHeads * kHeadDim, 7), value = numbers(kSeqLen * kKvHeads * kHeadDim, 8);
  check(ps_write_kv(&kv_cache, key.data(), kKvHeads * kHeadDim, value.data(), kKvHeads * kHeadDim, slots.data(),
                    kSeqLen));
  const int32_t starts[] = {0, kQueryLen}, seq_lens[] = {kSeqLen};
  const ps_attention_rows rows{starts, seq_lens, table.data(), kNumBlocks, 1, kQueryLen};
  const Floats query = numbers(kQueryLen * kHeads * kHeadDim, 9);
  Floats out(query.size(), NAN);
  check(ps_paged_attention(out.data(), kHeads * kHeadDim, query.data(), kHeads * kHeadDim, kHeads, &kv_cache, &rows,
                           0.2f, 50, 3.f));
  return out;
}

// Products of one row and of kRows, then a row read back. Formats that only files fill take kGgmlType blocks of
// kBlockBytes whose fp16 scales lie at kScaleAt and, if not equal, at kMinAt.
template <int kFormat, int kGgmlType = -1, int kBlockBytes = 0, int kScaleAt = 0, int kMinAt = 0>
Floats linear() {
  constexpr int64_t kOut = 37, kIn = 256, kRows = 23;  // more than a tile of AMX
  const int64_t bytes = ps_linear_packed_bytes(kFormat, kOut, kIn);
  std::vector<uint8_t> storage(bytes + 64);
  uint8_t* data = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
  const ps_linear_weight weight{data, kOut, kIn, kFormat};
  if (kGgmlType < 0) {
    const Floats dense = numbers(kOut * kIn, 10);
    check(ps_linear_pack(&weight, 0, kOut, dense.data(), kIn, PS_F32));
  } else {
    const Floats random = numbers(kOut * kBlockBytes, 11);
    std::vector<uint8_t> blocks(random.size());
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>((random[i] + 2.f) * 64.f);
    for (int64_t row = 0; row < kOut; ++row) {
      for (const int at : {kScaleAt, kMinAt}) {
        blocks[row * kBlockBytes + at] = static_cast<uint8_t>(row);
        blocks[row * kBlockBytes + at + 1] = 0x14;  // about 2^-10
      }
    }
    check(ps_linear_pack_ggml(&weight, 0, kOut, blocks.data(), kBlockBytes, kGgmlType));
  }
  const Floats x = numbers(kRows * kIn, 12), bias = numbers(kOut, 13), residual = numbers(kRows * kOut, 14);
  Floats out((kRows + 1) * kOut, NAN), row(kIn, NAN);
  check(ps_linear(out.data(), kOut, x.data(), kIn, kRows, &weight, bias.data(), residual.data(), kOut));
  check(ps_linear(out.data() + kRows * kOut, kOut, x.data(), kIn, 1, &weight, nullptr, nullptr, 0));
  const int64_t last = kOut - 1;
  check(ps_linear_rows(row.data(), kIn, &weight, &last, 1));
  out.insert(out.end(), row.begin(), row.end());
  return out;
}

// The experts of 40 tokens, so that some have a tile of AMX; and which these are.
template <int kFormat>
Floats experts() {
  constexpr int64_t kRows = 40, kHidden = 96, kInner = 64, kExperts = 5, kTopK = 3;
  std::vector<std::vector<uint8_t>> memory;
  const auto packed = [&](int64_t out_features, int64_t in_features, uint32_t seed) {
    memory.emplace_back(ps_linear_packed_bytes(kFormat, out_features, in_features) + 64);
    uint8_t* data = memory.back().data();
    const ps_linear_weight weight{data + (64 - reinterpret_cast<uintptr_t>(data) % 64) % 64, out_features, in_features,
                                  kFormat};
    Floats dense = numbers(out_features * in_features, seed);
    for (float& x : dense) x *= 0.05f;
    check(ps_linear_pack(&weight, 0, out_features, dense.data(), in_features, PS_F32));
    return weight;
  };
  std::vector<ps_linear_weight> gate_up, down;
  for (int64_t e = 0; e < kExperts; ++e) {
    gate_up.push_back(packed(kInner, kHidden, 20 + 3 * e));
    gate_up.push_back(packed(kInner, kHidden, 21 + 3 * e));
    down.push_back(packed(kHidden, kInner, 22 + 3 * e));
  }
  Floats weights(kRows * kTopK, NAN), out(kRows * kHidden, NAN);
  std::vector<int64_t> chosen(kRows * kTopK);
  const Floats logits = numbers(kRows * kExperts, 15), x = numbers(kRows * kHidden, 16);
  check(ps_route(weights.data(), chosen.data(), logits.data(), kExperts, kRows, kExperts, kTopK, 1));
  check(ps_experts_sum(out.data(), kHidden, x.data(), kHidden, kRows, weights.data(), chosen.data(), kTopK,
                       gate_up.data(), down.data(), kExperts, PS_SILU));
  out.insert(out.end(), weights.begin(), weights.end());
  out.insert(out.end(), chosen.begin(), chosen.end());
  return out;
}

Floats sampling() {
  constexpr int64_t kRows = 6, kVocab = 1003;
  Floats logits = numbers(kRows * kVocab, 17);
  logits[5] = NAN;
  const Floats temperature = {0.f, 1.f, 0.7f, 2.f, 1.f, 0.5f}, min_p = {0.f, 0.f, 0.05f, 0.f, 0.f, 0.1f};
  const std::vector<int64_t> top_k = {0, 0, 40, 5, 0, 900};
  const std::vector<double> top_p = {1., 1., 1., 0.9, 0.5, 0.95}, uniform = {0.5, 0.01, 0.3, 0.999, 0.77, 0.4};
  std::vector<int64_t> tokens(kRows);
  check(ps_sample(logits.data(), kVocab, kRows, kVocab, temperature.data(), min_p.data(), top_k.data(), top_p.data(),
                  uniform.data(), tokens.data()));
  return Floats(tokens.begin(), tokens.end());
}

const Case kCases[] = {
    {"rms_norm", rms_norm},
    {"layer_norm", layer_norm},
    {"elementwise", elementwise},
    {"rotary_embedding", rotary_embedding},
    {"silu", activation<PS_SILU>},
    {"gelu_tanh", activation<PS_GELU_TANH>},
    {"gelu_erf", activation<PS_GELU_ERF>},
    {"attention fp32, blocks of 16", attention<PS_F32, 16>},
    {"attention bf16, blocks of 16", attention<PS_BF16, 16>},
    {"attention bf16, blocks of 2", attention<PS_BF16, 2>},
    {"attention fp16, blocks of 64", attention<PS_F16, 64>},
    {"attention int8, blocks of 16", attention<PS_I8, 16>},
    {"attention int8, blocks of 2", attention<PS_I8, 2>},
    {"linear fp32", linear<PS_LINEAR_F32>},
    {"linear bf16", linear<PS_LINEAR_BF16>},
    {"linear fp16", linear<PS_LINEAR_F16>},
    {"linear int8", linear<PS_LINEAR_INT8>},
    {"linear int8_g16 (Q6_K)", linear<PS_LINEAR_INT8_G16, 14, 210, 208, 208>},
    {"linear int8_min (Q5_K)", linear<PS_LINEAR_INT8_MIN, 13, 176, 0, 2>},
    {"linear int4_sym", linear<PS_LINEAR_INT4_SYM>},
    {"linear int4", linear<PS_LINEAR_INT4>},
    {"linear int4_f32 (Q4_K)", linear<PS_LINEAR_INT4_F32, 12, 144, 0, 2>},
    {"experts bf16", experts<PS_LINEAR_BF16>},
    {"experts int8", experts<PS_LINEAR_INT8>},
    {"experts int4", experts<PS_LINEAR_INT4>},
    {"sampling", sampling},
};

}  // namespace

int main() {
  int failures = 0;
  std::string isas = ps_available_isas();
  std::vector<Floats> wanted;
  check(ps_select_isa("scalar"));
  for (const Case& item : kCases) wanted.push_back(item.run());
  for (size_t start = 0; start < isas.size();) {
    const size_t end = std::min(isas.find(',', start), isas.size());
    const std::string isa = isas.substr(start, end - start);
    start = end + 1;
    check(ps_select_isa(isa.c_str()));
    for (size_t i = 0; i < wanted.size(); ++i) {
      const Floats found = kCases[i].run();
      float worst = 0.f;
      for (size_t j = 0; j < found.size(); ++j) {
        const float error = std::fabs(found[j] - wanted[i][j]) / (1.f + std::fabs(wanted[i][j]));
        if (!(error <= worst)) worst = error;  // a NaN counts as worst
      }
      // AMX rounds operands beside 4-bit weights otherwise (cpu/linear_exact.h).
      const bool is_otherwise = isa == "amx" && std::strstr(kCases[i].name, "int4") != nullptr;
      const bool good = worst < (is_otherwise ? 5e-2f : 1e-5f);
      failures += !good;
      std::printf("%-12s %-30s %.1e %s\n", isa.c_str(), kCases[i].name, worst, good ? "ok" : "WRONG");
    }
  }
  return failures == 0 ? 0 : 1;
}
