// Included once for each instruction set by floats.cpp. Plain functions and no templates: GCC's
// target pragma is not sure to reach an instantiation.

static inline float widen(float x) { return x; }
static inline double widen(double x) { return x; }
static inline float widen(Brain x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, double* out) { *out = x; }
static inline void narrow(double x, double* out) { *out = x; }
static inline void narrow(double x, float* out) { *out = static_cast<float>(x); }
static inline void narrow(float x, Brain* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
static inline void narrow(double x, Brain* out) { narrow(static_cast<float>(x), out); }

#ifdef __F16C__
static inline float widen(Half x) { return _cvtsh_ss(x.bits); }
static inline void narrow(float x, Half* out) { out->bits = _cvtss_sh(x, 0); }
#else
static inline float widen(Half x) {
  return torch::headeronly::Half(x.bits, torch::headeronly::Half::from_bits());
}
static inline void narrow(float x, Half* out) { out->bits = torch::headeronly::Half(x).x; }
#endif
static inline void narrow(double x, Half* out) { narrow(static_cast<float>(x), out); }

#define CP_DISPATCH_LOOPS(Acc, Type)                                                    \
  static void scale_##Acc##_##Type(Acc* sum, const void* x, Acc weight, int64_t n) {    \
    const Type* from = static_cast<const Type*>(x);                                     \
    for (int64_t i = 0; i < n; ++i) sum[i] = weight * static_cast<Acc>(widen(from[i])); \
  }                                                                                     \
  static void add_##Acc##_##Type(Acc* sum, const void* x, Acc weight, int64_t n) {      \
    const Type* from = static_cast<const Type*>(x);                                     \
    for (int64_t i = 0; i < n; ++i) sum[i] += weight * static_cast<Acc>(widen(from[i]));\
  }                                                                                     \
  static void store_##Acc##_##Type(void* out, const Acc* sum, int64_t n) {              \
    Type* to = static_cast<Type*>(out);                                                 \
    for (int64_t i = 0; i < n; ++i) narrow(sum[i], to + i);                             \
  }

CP_DISPATCH_LOOPS(float, float)
CP_DISPATCH_LOOPS(float, double)
CP_DISPATCH_LOOPS(float, Brain)
CP_DISPATCH_LOOPS(double, float)
CP_DISPATCH_LOOPS(double, double)
CP_DISPATCH_LOOPS(double, Brain)
CP_DISPATCH_LOOPS(double, Half)

#ifdef __F16C__
// GCC does not vectorise the conversion by itself.
static void scale_float_Half(float* sum, const void* x, float weight, int64_t n) {
  const Half* from = static_cast<const Half*>(x);
  const __m256 factor = _mm256_set1_ps(weight);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(sum + i, _mm256_mul_ps(factor, _mm256_cvtph_ps(bits)));
  }
  for (; i < n; ++i) sum[i] = weight * widen(from[i]);
}
static void add_float_Half(float* sum, const void* x, float weight, int64_t n) {
  const Half* from = static_cast<const Half*>(x);
  const __m256 factor = _mm256_set1_ps(weight);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m256 part = _mm256_mul_ps(factor, _mm256_cvtph_ps(bits));
    _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_loadu_ps(sum + i), part));
  }
  for (; i < n; ++i) sum[i] += weight * widen(from[i]);
}
static void store_float_Half(void* out, const float* sum, int64_t n) {
  Half* to = static_cast<Half*>(out);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(sum + i), 0);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bits);
  }
  for (; i < n; ++i) narrow(sum[i], to + i);
}
#else
CP_DISPATCH_LOOPS(float, Half)
#endif
#undef CP_DISPATCH_LOOPS

#define CP_DISPATCH_OPS(Acc, Type) {scale_##Acc##_##Type, add_##Acc##_##Type, store_##Acc##_##Type}
static const FloatOps<float> float_table[] = {
    CP_DISPATCH_OPS(float, Brain), CP_DISPATCH_OPS(float, Half), CP_DISPATCH_OPS(float, float),
    CP_DISPATCH_OPS(float, double)};
static const FloatOps<double> double_table[] = {
    CP_DISPATCH_OPS(double, Brain), CP_DISPATCH_OPS(double, Half), CP_DISPATCH_OPS(double, float),
    CP_DISPATCH_OPS(double, double)};
#undef CP_DISPATCH_OPS
