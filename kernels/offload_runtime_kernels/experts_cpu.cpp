// Routed experts in host memory. experts_cpu.py says what this computes; experts.py has the arithmetic.
//
// Compiled with RUN, the dtype of rows and results (BF16, F16 or F32), and FORMATS(X), encodings: X(Q4_K) X(FP8_F32).
// A vector has the same column of as many rows of a matrix as it has lanes. Weights are decoded where they are
// multiplied: sixteen bytes of each row are transposed, so that a lane has four columns in a word, or more.

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LANES 16
#define WITH_AVX512
#else
#define LANES 8
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WITH_AVX2
#endif
#endif
#define INLINE inline __attribute__((always_inline))
#if defined(WITH_AVX512) || defined(WITH_AVX2)
#define OPERATION INLINE
#else
#define OPERATION __attribute__((noinline))  // many instructions, which would take minutes to compile everywhere
#endif

namespace {

using F = float __attribute__((vector_size(4 * LANES)));
using I = int32_t __attribute__((vector_size(4 * LANES)));
using U = uint32_t __attribute__((vector_size(4 * LANES)));
using Bytes = const uint8_t*;

enum class Dtype { BF16, F16, F32 };
constexpr Dtype DTYPE = Dtype::RUN;
constexpr int ROWS = 4;           // of x that are multiplied with a weight that is decoded once
constexpr int MOST = 256;         // columns of a step
constexpr int PANEL = 4 * LANES, HALF_PANEL = PANEL / 2;  // rows of a matrix that are a task

template <int... K, class Step>
INLINE void unrolled(std::integer_sequence<int, K...>, Step step) {
    (step(std::integral_constant<int, K>()), ...);
}

template <int N, class Step>
INLINE void unrolled(Step step) {
    unrolled(std::make_integer_sequence<int, N>(), step);
}

template <class V>
INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
INLINE void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

INLINE F number(float value) { return value - F{}; }
INLINE U word(uint32_t value) { return value - U{}; }
INLINE F not_a_number() { return (F)word(0x7fc00000); }
INLINE F number(U integers) { return __builtin_convertvector((I)integers, F); }
INLINE bool any(I condition) {
    int found = 0;
    for (int i = 0; i < LANES; ++i) found |= condition[i];
    return found;
}
INLINE F where(I condition, F a, F b) { return (F)((condition & (I)a) | (~condition & (I)b)); }

// Bits of a where the mask has ones, else of b.
OPERATION U masked(U mask, U a, U b) {
#if defined(WITH_AVX512)
    return (U)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)a, (__m512i)b, 0xca);
#else
    return (mask & a) | (~mask & b);
#endif
}

OPERATION F fma(F a, F b, F c) {
#if defined(WITH_AVX512)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(WITH_AVX2)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int i = 0; i < LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Four words of each row.
OPERATION void transpose(const Bytes* rows, long at, U out[4]) {
    asm("" : "+r"(rows));  // that pointers are loaded where they are used, and not kept in vector registers
#if defined(WITH_AVX512) || defined(WITH_AVX2)
    auto row = [&](int i) { return _mm_loadu_si128((const __m128i*)(rows[i] + at)); };
#endif
#if defined(WITH_AVX512)
    __m512i a[4];
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
        a[i] = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(4 + i), 1);
        a[i] = _mm512_inserti32x4(_mm512_inserti32x4(a[i], row(8 + i), 2), row(12 + i), 3);
    });
    __m512i low0 = _mm512_unpacklo_epi32(a[0], a[1]), high0 = _mm512_unpackhi_epi32(a[0], a[1]);
    __m512i low1 = _mm512_unpacklo_epi32(a[2], a[3]), high1 = _mm512_unpackhi_epi32(a[2], a[3]);
    out[0] = (U)_mm512_unpacklo_epi64(low0, low1), out[1] = (U)_mm512_unpackhi_epi64(low0, low1);
    out[2] = (U)_mm512_unpacklo_epi64(high0, high1), out[3] = (U)_mm512_unpackhi_epi64(high0, high1);
#elif defined(WITH_AVX2)
    __m256i a[4];
    unrolled<4>([&](auto i) __attribute__((always_inline)) {
        a[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(4 + i), 1);
    });
    __m256i low0 = _mm256_unpacklo_epi32(a[0], a[1]), high0 = _mm256_unpackhi_epi32(a[0], a[1]);
    __m256i low1 = _mm256_unpacklo_epi32(a[2], a[3]), high1 = _mm256_unpackhi_epi32(a[2], a[3]);
    out[0] = (U)_mm256_unpacklo_epi64(low0, low1), out[1] = (U)_mm256_unpackhi_epi64(low0, low1);
    out[2] = (U)_mm256_unpacklo_epi64(high0, high1), out[3] = (U)_mm256_unpackhi_epi64(high0, high1);
#else
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) out[j][i] = load<uint32_t>(rows[i] + at + 4 * j);
#endif
}

// An integer of each row.
template <class Integer>
INLINE U gathered(const Bytes* rows, long at) {
    U out;
    for (int i = 0; i < LANES; ++i) out[i] = load<Integer>(rows[i] + at);
    return out;
}

#if defined(WITH_AVX512)
// Of lanes' lowest four bits, or five, what a table has there: as fast as it gets from integers to fp32.
INLINE F looked_up(U places, __m512 table) { return (F)_mm512_permutexvar_ps((__m512i)places, table); }
#endif

// Byte K of words, which is below 2^BITS.
template <int BITS, int K>
OPERATION F byte(U words) {
#if defined(WITH_AVX512)
    const __m512 low = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    if constexpr (BITS == 4) return looked_up(words >> 8 * K, low);
    const __m512 high = _mm512_add_ps(low, _mm512_set1_ps(16));
    if constexpr (BITS == 5) return (F)_mm512_permutex2var_ps(low, (__m512i)(words >> 8 * K), high);
    return (F)_mm512_cvtepi32_ps(_mm512_shuffle_epi8((__m512i)words, _mm512_set4_epi32(
        (int)0x8080800c + K, (int)0x80808008 + K, (int)0x80808004 + K, (int)0x80808000 + K)));
#elif defined(WITH_AVX2)
    return (F)_mm256_cvtepi32_ps(_mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(_mm_set_epi32(
        (int)0x8080800c + K, (int)0x80808008 + K, (int)0x80808004 + K, (int)0x80808000 + K))));
#else
    return number(words >> 8 * K & 255);
#endif
}

// fp16 in the lower half of words; of NaN there is one, or none if none are MAYBE_NAN.
template <bool MAYBE_NAN = true>
OPERATION F half(U words) {
#if defined(WITH_AVX512)
    F found = (F)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)words));
#elif defined(WITH_AVX2)
    __m256i packed = _mm256_packus_epi32((__m256i)(words & 0xffff), _mm256_setzero_si256());
    F found = (F)_mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 8)));
#else
    U sign = (words & 0x8000) << 16, exponent = words & 0x7c00, bits = (words & 0x7fff) << 13;
    F normal = (F)(bits + word(112 << 23)), small = number(words & 0x3ff) * 0x1p-24f;
    F found = where(exponent == 0, small, where(exponent == 0x7c00, (F)(bits | 0x7f800000), normal));
    found = (F)((U)found | sign);
#endif
    return MAYBE_NAN ? where(found == found, found, not_a_number()) : found;
}

enum class Range { ANY, FINITE, SMALL };  // of numbers: NaN may be among them, or none, or all are below 2^111

// Rounded to a dtype, that of the run, in fp32.
template <Range OF = Range::ANY, Dtype TO = DTYPE>
OPERATION F rounded(F v) {
    if constexpr (TO == Dtype::BF16 && OF == Range::SMALL) {
        // Of 2^16 v - v, where 24 bits of it end, so do 8 of v, or 9 if v is so near a power of two that it does not
        // matter. A tie falls to an even number since 2^16 v is one there.
        F apart = fma(v, number(-0x1p16f), v);
        return fma(v, number(0x1p16f), apart);
    } else if constexpr (TO == Dtype::BF16) {
        U bits = (U)v;
        F found = (F)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
        return OF == Range::ANY ? where(v == v, found, not_a_number()) : found;
    } else if constexpr (TO == Dtype::F16) {
#if defined(WITH_AVX512)
        return (F)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(WITH_AVX2)
        return (F)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
        U bits = (U)v & 0x7fffffff, sign = (U)v & 0x80000000;
        F small = (F)bits + 0.75f - 0.75f;  // below 2^-14 there are multiples of 2^-24
        F found = where(bits < 0x38800000, small, (F)((bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000));
        found = where(bits >= 0x477ff000, (F)word(0x7f800000), found);
        return where(v == v, (F)((U)found | sign), not_a_number());
#endif
    } else {
        return v;
    }
}

// What has been rounded, in the dtype of the run.
void store_results(const float* values, long count, void* to, long at) {
    for (long i = 0; i < count; ++i) {
        uint32_t bits = load<uint32_t>(values + i), size = bits & 0x7fffffff;
        uint16_t half = bits >> 16;
        if constexpr (DTYPE == Dtype::F16) {
            uint32_t places = size < 0x38800000 ? (uint32_t)(load<float>(&size) * 0x1p24f) : (size >> 13) - (112 << 10);
            half = (half & 0x8000) | (size > 0x7f800000 ? 0x7e00 : size == 0x7f800000 ? 0x7c00 : places);
        }
        if constexpr (DTYPE == Dtype::F32)
            store((float*)to + at + i, bits);
        else
            store((uint16_t*)to + at + i, half);
    }
}

F widened(const void* from) {
    if constexpr (DTYPE == Dtype::F32) return load<F>(from);
    using Half = uint16_t __attribute__((vector_size(2 * LANES)));
    U words = __builtin_convertvector(load<Half>(from), U);
    return DTYPE == Dtype::BF16 ? (F)(words << 16) : half(words);
}

// --- encodings: a step of a few columns is opened, then its groups, and `weight` says a column of the last of those

struct Elements {
    static constexpr Range RANGE = Range::ANY;
    U words[4];
    INLINE void open(const Bytes* rows, long, long step) { transpose(rows, step * 16, words); }
    INLINE void group(int) {}
};

struct F32 : Elements {
    static constexpr int STEP = 4, GROUP = 4;
    static constexpr bool is_exact(Dtype dtype) { return dtype == Dtype::F32; }
    template <int K>
    INLINE F weight() const { return (F)words[K]; }
};

struct BF16 : Elements {
    static constexpr int STEP = 8, GROUP = 8;
    static constexpr bool is_exact(Dtype dtype) { return dtype != Dtype::F16; }
    template <int K>
    INLINE F weight() const { return (F)(K % 2 ? words[K / 2] & 0xffff0000 : words[K / 2] << 16); }
};

struct F16 : Elements {
    static constexpr int STEP = 8, GROUP = 8;
    static constexpr bool is_exact(Dtype dtype) { return dtype != Dtype::BF16; }
    template <int K>
    INLINE F weight() const { return half(words[K / 2] >> K % 2 * 16); }
};

// Blocks in planes, w = scale q + offset with q from 0 to 255. Of 64 bytes of q every fourth pair lies in one of four
// sixteenths, four words: those of a group of 32 columns begin at `first`. With an offset that is a whole number of
// scales every operation but the last rounding is exact, as it is where q takes it off first.
struct Blocks {
    static constexpr Range RANGE = Range::SMALL;
    static constexpr int GROUP = 32;
    static constexpr bool is_exact(Dtype dtype) { return dtype == Dtype::F32; }
    U before, words[33];  // of half-bytes the lower ones, then the upper ones; they are read from any byte on
    int first;
    U shared[4];              // what sixteen bytes say of some steps
    F scales[2], offsets[2];  // of a half of the group each
    static constexpr int byte_of(int k) { return k / 8 % 2 * 2 + k % 2; }
    INLINE void take(const Bytes* rows, long at) {
        for (int i = 0; i < 4; ++i) transpose(rows, at + 16 * i, words + 4 * i);
    }
    INLINE void scale(F by, F offset) {
        scales[0] = scales[1] = by;
        offsets[0] = offsets[1] = offset;
    }
    // Take half-bytes, of which `decoded(four, piece, number)` makes four bytes; the number of four, 0 to 7, says that
    // they are in the word `number % 4` of the piece, and of bytes' upper halves from 4 on.
    template <class Decode>
    INLINE void take_halves(const Bytes* rows, long at, Decode decoded) {
        for (int i = 0; i < 4; ++i) {
            U four[4];
            transpose(rows, at + 16 * i, four);
            unrolled<4>([&](auto j) __attribute__((always_inline)) {
                words[4 * i + j] = decoded(four[j], i, j);
                words[4 * i + j + 16] = decoded(four[j] >> 4, i, std::integral_constant<int, j + 4>());
            });
        }
    }
    static INLINE U low_half(U four) {
#if defined(WITH_AVX512)
        return four;  // `looked_up` takes no others
#else
        return four & 0x0f0f0f0f;
#endif
    }
    INLINE void take_halves(const Bytes* rows, long at) {
        take_halves(rows, at, [](U four, int, auto) __attribute__((always_inline)) { return low_half(four); });
    }
    // A byte of a word behind the first one, as fp32.
    template <int BITS, int WORD, int BYTE>
    INLINE F number_at() const {
        return byte<BITS, BYTE>(words[first + WORD]);
    }
    template <int WORD, int BYTE>
    INLINE F half_at() const {
#if defined(WITH_AVX512)
        return byte<4, 0>(load<U>((Bytes)(words + first + WORD) + BYTE));  // a shift less
#else
        return number_at<4, WORD, BYTE>();
#endif
    }
    INLINE F scaled(F q, int part) const { return fma(q, scales[part], offsets[part]); }
    // With 1 + q 2^-15 of bytes, or 1 + q 2^-7 of six bits, no integer is converted: of a scale of few bits, and an
    // offset that is a whole number of scales, all of this is exact.
    template <int BITS>
    static constexpr int PLACE = BITS == 6 ? 16 : 8;
    template <int BITS>
    INLINE void scale_fractions(int part, F by, float zero) {
        constexpr float ONE = 1 << (23 - PLACE<BITS>);
        scales[part] = by * ONE, offsets[part] = by * -(ONE + zero);
    }
    template <int BITS, int WORD, int BYTE>
    INLINE F fraction_at() const {
        U there = load<U>((Bytes)(words + first + WORD) + BYTE - PLACE<BITS> / 8);
        return (F)masked(word(((1 << BITS) - 1) << PLACE<BITS>), there, word(0x3f800000));
    }
};

// Where the 32 columns of a block are both halves of bytes.
template <int K>
constexpr int WORD_OF_BLOCK = K / 2 % 4 * 4 + K / 16 * 16;
// Where they are halves of 32 bytes, or bytes.
template <int K>
constexpr int WORD_OF_PAIR = K / 2 % 4 * 4 + K / 16;

struct Q8_0 : Blocks {
    static constexpr int STEP = 64;
    U halves;
    INLINE void open(const Bytes* rows, long blocks, long step) {
        take(rows, step * 64);
        for (int i = 0; i < 16; ++i) words[i] ^= 0x80808080;
        if (step % 4 == 0) transpose(rows, blocks * 32 + step * 4, shared);
        halves = shared[step % 4];
    }
    INLINE void group(int block) {
        scale_fractions<8>(0, half(halves >> 16 * block), 128);
        first = 2 * block;
    }
    template <int K>
    INLINE F weight() const { return scaled(fraction_at<8, WORD_OF_PAIR<K>, byte_of(K)>(), 0); }
};

struct Q4_0 : Blocks {
    static constexpr int STEP = 128;
    U halves[2];
    INLINE void open(const Bytes* rows, long blocks, long step) {
        take_halves(rows, step * 64);
        if (step % 2 == 0) transpose(rows, blocks * 16 + step * 8, shared);
        for (int i = 0; i < 2; ++i) halves[i] = shared[step % 2 * 2 + i];
    }
    INLINE void group(int block) {
        F d = half(halves[block / 2] >> 16 * (block % 2));
        scale(d, d * -8);
        first = block;
    }
    template <int K>
    INLINE F weight() const { return scaled(half_at<WORD_OF_BLOCK<K>, byte_of(K)>(), 0); }
};

struct MXFP4 : Blocks {
    static constexpr int STEP = 128;
    static constexpr bool is_exact(Dtype dtype) { return dtype != Dtype::F16; }
    U exponents;
    template <int ZERO = 12>
    INLINE void open(const Bytes* rows, long blocks, long step) {
        take_codes<ZERO>(*this, rows, step * 64);
        if (step % 4 == 0) transpose(rows, blocks * 16 + step * 4, shared);
        exponents = shared[step % 4];
    }
    INLINE U exponent(int block) const { return exponents >> 8 * block & 255; }
    INLINE void group(int block) {
        U e = exponent(block);
        // Half of 2^(e - 127), of which the two least are no normal numbers.
        F d = where(e < 2, (F)(word(1 << 21) << (e & 1)), (F)((e - 1) << 23));
        scale(d, d * -12);
        first = block;
    }
    template <int K>
    INLINE F weight() const { return e2m1_at<WORD_OF_BLOCK<K>, byte_of(K)>(*this, 0); }

    // Twice the numbers of E2M1, and ZERO; of AVX-512, which looks them up where they are multiplied, their places.
    template <int ZERO>
    static INLINE U codes(U places) {
#if defined(WITH_AVX512)
        return places;
    }
    template <int WORD, int BYTE, class Numbers>
    static INLINE F twice_at(const Numbers& of) {
        const __m512 twice = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        return looked_up(load<U>((Bytes)(of.words + of.first + WORD) + BYTE), twice);
#else
        alignas(16) static const int8_t table[] = {
            ZERO, ZERO + 1, ZERO + 2, ZERO + 3, ZERO + 4, ZERO + 6, ZERO + 8, ZERO + 12,
            ZERO, ZERO - 1, ZERO - 2, ZERO - 3, ZERO - 4, ZERO - 6, ZERO - 8, ZERO - 12};
#if defined(WITH_AVX2)
        __m256i wide = _mm256_broadcastsi128_si256(*(const __m128i*)table);
        return (U)_mm256_shuffle_epi8(wide, (__m256i)low_half(places));
#else
        uint8_t each[sizeof places];
        store(each, low_half(places));
        for (uint8_t& place : each) place = table[place];
        return load<U>(each);
#endif
#endif
    }
    template <int ZERO = 12>
    static INLINE void take_codes(Blocks& blocks, const Bytes* rows, long at) {
        auto decoded = [](U four, int, auto) __attribute__((always_inline)) { return codes<ZERO>(four); };
        blocks.take_halves(rows, at, decoded);
    }
    // A number scaled by one of the scales, half of its own.
    template <int WORD, int BYTE, class Numbers>
    static INLINE F e2m1_at(const Numbers& of, int part) {
#if defined(WITH_AVX512)
        return twice_at<WORD, BYTE>(of) * of.scales[part];
#else
        return of.scaled(of.template number_at<8, WORD, BYTE>(), part);
#endif
    }
};

// The same without the scales, powers of two: sums are counted in the scale of a row's last block, and multiplied where
// it changes, which takes an operation in 32 columns and not in each. All of it is exact, and multiply-adds round what
// those of scaled numbers round, as long as nothing leaves the range of fp32: with exponents from LEAST to MOST, and x
// that is 0 or from 2^-80 to 2^36. Sums are then multiples of 2^(-103 + LEAST - MOST), and of a million columns
// below 2^(60 + MOST - LEAST) ONE.
struct UnscaledMXFP4 : MXFP4 {
    static constexpr uint32_t LEAST = 94, MOST = 134;
    U last = word(128), least = word(128), most = word(128);
    static INLINE bool takes(const float* x, long columns) {
        U smallest = word(~0u), largest = word(0);
        for (long i = 0; i < columns; i += LANES) {
            U size = load<U>(x + i) & 0x7fffffff, less = size - 1;  // of 0 the most
            smallest = less < smallest ? less : smallest, largest = size > largest ? size : largest;
        }
        return !any((smallest < ((127 - 80) << 23) - 1) | (largest > (127 + 36) << 23));
    }
    INLINE void open(const Bytes* rows, long blocks, long step) { MXFP4::open<0>(rows, blocks, step); }
    // What sums are multiplied with where a group begins, and behind the last one.
    INLINE F group(int block) {
        first = block;
        U e = exponent(block), before = last;
        last = e;
        least = e < least ? e : least, most = e > most ? e : most;
        return (F)((before - e + 127) << 23);
    }
    INLINE F end() const { return (F)((last - 1) << 23) / ONE; }
    INLINE bool was_in_range() const { return !any((least < LEAST) | (most > MOST)); }
#if defined(WITH_AVX512)
    static constexpr float ONE = 1;
    template <int K>
    INLINE F weight() const { return twice_at<WORD_OF_BLOCK<K>, byte_of(K)>(*this); }
#else
    static constexpr float ONE = 1 << 24;
    template <int K>
    INLINE F weight() const {
        I top = (I)load<U>((Bytes)(words + first + WORD_OF_BLOCK<K>) + byte_of(K) - 3) & (int)0xff000000;
        return __builtin_convertvector(top, F);
    }
#endif
};

// Eight groups with scales and minima of six bits in twelve bytes.
struct Packed : Blocks {
    static constexpr int STEP = 256;
    Bytes const* rows;
    long at;  // of the block's q
    F d, m;
    U by[2], minima[2];
    INLINE void open(const Bytes* from, long q_at, long head_at) {
        U head[4];
        transpose(rows = from, head_at, head);
        at = q_at;
        d = half(head[0]), m = half(head[0] >> 16);
        by[0] = head[1] & 0x3f3f3f3f, minima[0] = head[2] & 0x3f3f3f3f;
        by[1] = (head[3] & 0x0f0f0f0f) | (head[1] >> 2 & 0x30303030);
        minima[1] = (head[3] >> 4 & 0x0f0f0f0f) | (head[2] >> 2 & 0x30303030);
    }
    template <class Format>
    INLINE void group(Format& format, int group) {
        int shift = group % 4 * 8;
        scale(d * number(by[group / 4] >> shift & 255), -(m * number(minima[group / 4] >> shift & 255)));
        if (group % 4 == 0) format.take_group(group);
        first = group / 2 % 2 * 2 + group % 2 * 16;
    }
};

struct Q4_K : Packed {
    INLINE void open(const Bytes* rows, long blocks, long step) {
        Packed::open(rows, step * 128, blocks * 128 + step * 16);
    }
    INLINE void take_group(int group) { take_halves(rows, at + group * 16); }
    INLINE void group(int group) { Packed::group(*this, group); }
    template <int K>
    INLINE F weight() const { return scaled(half_at<WORD_OF_PAIR<K>, byte_of(K)>(), 0); }
};

struct Q5_K : Packed {
    U upper[8];
    INLINE void open(const Bytes* rows, long blocks, long step) {
        Packed::open(rows, step * 128, blocks * 160 + step * 16);
        transpose(rows, blocks * 128 + step * 32, upper);
        transpose(rows, blocks * 128 + step * 32 + 16, upper + 4);
    }
    INLINE void take_group(int group) {
        take_halves(rows, at + group * 16, [&](U four, int i, auto number) __attribute__((always_inline)) {
            constexpr int BIT = number % 4 / 2 * 2 + number / 4;  // of the four of these groups
            return masked(word(0x0f0f0f0f), four, upper[i * 2 + number % 2] << (4 - BIT)) & 0x1f1f1f1f;
        });
        for (U& bits : upper) bits >>= 4;
    }
    INLINE void group(int group) { Packed::group(*this, group); }
    template <int K>
    INLINE F weight() const { return scaled(number_at<5, WORD_OF_PAIR<K>, byte_of(K)>(), 0); }
};

struct Q6_K : Blocks {
    static constexpr int STEP = 256;
    Bytes const* rows;
    long at;
    F d;
    U upper[16], by[4];
    INLINE void open(const Bytes* from, long blocks, long step) {
        rows = from, at = step * 128;
        for (int i = 0; i < 4; ++i) transpose(rows, blocks * 128 + step * 64 + 16 * i, upper + 4 * i);
        transpose(rows, blocks * 192 + step * 16, by);
        d = half(gathered<uint16_t>(rows, blocks * 208 + step * 2));
    }
    INLINE void group(int group) {
        if (group % 4 == 0) take_group(group);
        first = group % 2 * 2 + group / 2 % 2 * 16;
        I pair = (I)(by[group / 2] >> group % 2 * 16);
        scale_fractions<6>(0, d * __builtin_convertvector(pair << 24 >> 24, F), 32);
        scale_fractions<6>(1, d * __builtin_convertvector(pair << 16 >> 24, F), 32);
    }
    INLINE void take_group(int group) {
        take_halves(rows, at + group * 16, [&](U four, int i, auto number) __attribute__((always_inline)) {
            constexpr int PLACE = number % 4 / 2 * 2 + number / 4 * 4;  // of two bits in a byte
            U bits = upper[i * 4 + group / 4 * 2 + number % 2];
            return masked(word(0x0f0f0f0f), four, PLACE < 4 ? bits << (4 - PLACE) : bits >> (PLACE - 4));
        });
    }
    template <int K>
    INLINE F weight() const { return scaled(fraction_at<6, WORD_OF_PAIR<K>, byte_of(K)>(), K / 16); }
};

struct Matrix {
    int64_t offset, row_bytes, columns;             // of an expert's block
    int64_t blocks;                                 // of a row, in planes
    int64_t columns_of_scale, scales_at, zeros_at;  // of numbers: where in a row scales begin, and zeros, or 0
    int32_t zero, encoding;
};

enum class Number { FP8, int8, uint8, uint4, E2M1 };

// Numbers of a row, and behind them its scales and zeros: w = (q - zero) scale, rounded to the dtype of the scales.
// Bytes lie as those of blocks do; of the half-bytes of a word those of even columns come first. Of scales of 16 bits
// products are exact before they are rounded, so that an offset, -zero scale, is a part of one multiply-add.
template <Number NUMBER, Dtype SCALE>
struct Scaled : Blocks {
    static constexpr int BITS = NUMBER == Number::uint4 || NUMBER == Number::E2M1 ? 4 : 8, STEP = 512 / BITS;
    Bytes const* rows;
    const Matrix* matrix;
    long column;
    static constexpr Range RANGE = SCALE == Dtype::F16 ? Range::SMALL : Range::FINITE;
    INLINE void open(const Bytes* from, const Matrix& of, long step) {
        rows = from, matrix = &of, column = step * STEP;
        if constexpr (NUMBER == Number::E2M1)
            MXFP4::take_codes(*this, rows, step * 64);
        else if constexpr (BITS == 4)
            take_halves(rows, step * 64);
        else
            take(rows, step * 64);
        if constexpr (NUMBER == Number::int8)
            for (int i = 0; i < 16; ++i) words[i] ^= 0x80808080;
    }
    INLINE void group(int block) {
        for (int part = 0; part < 2; ++part) {
            long at = (column + 32 * block + 16 * part) / matrix->columns_of_scale;
            if (part && matrix->columns_of_scale >= 32)
                scales[1] = scales[0], offsets[1] = offsets[0];
            else
                scale_and_offset(at, scales[part], offsets[part]);
        }
        first = BITS == 4 ? block : 2 * block;
    }
    INLINE void scale_and_offset(long at, F& by, F& offset) {
        if constexpr (SCALE == Dtype::F32) by = (F)gathered<uint32_t>(rows, matrix->scales_at + 4 * at);
        if constexpr (SCALE == Dtype::BF16) by = (F)(gathered<uint16_t>(rows, matrix->scales_at + 2 * at) << 16);
        if constexpr (SCALE == Dtype::F16) by = half<false>(gathered<uint16_t>(rows, matrix->scales_at + 2 * at));
        if constexpr (NUMBER == Number::FP8) by *= 256;  // they are read as numbers of fp16, whose bias is 8 more
        if constexpr (NUMBER == Number::E2M1) by *= 0.5f;
        F zero = number((float)matrix->zero);
        if (matrix->zeros_at) {
            U stored = gathered<uint8_t>(rows, matrix->zeros_at + at * BITS / 8) >> at * BITS % 8 & ((1 << BITS) - 1);
            zero += number(NUMBER == Number::int8 ? stored ^ 0x80 : stored);
        }
        offset = SCALE == Dtype::F32 ? zero : zero * -by;
    }
    INLINE F scaled(F q, int part) const {
        if constexpr (SCALE == Dtype::F32) return (q - offsets[part]) * scales[part];
        return fma(q, scales[part], offsets[part]);
    }
    template <int K>
    INLINE F weight() const {
        F w;
        // Of half-bytes K / 8 of those of the even columns, or of the odd ones.
        constexpr int PART = K / 16, HALF = K / 8 + K % 2 * 4;
        constexpr int WORD = BITS == 4 ? K / 2 % 4 * 4 + HALF % 2 * 16 : WORD_OF_PAIR<K>;
        constexpr int BYTE = BITS == 4 ? HALF / 2 : byte_of(K);
        if constexpr (NUMBER == Number::FP8) {
            U pairs = BYTE % 2 ? words[first + WORD] : words[first + WORD] << 8;
            pairs = (pairs & 0x80008000) | (pairs & 0x7f007f00) >> 1;
            w = half<false>(BYTE / 2 ? pairs >> 16 : pairs) * scales[PART];
        } else if constexpr (NUMBER == Number::E2M1) {
            w = MXFP4::e2m1_at<WORD, BYTE>(*this, PART);
        } else if constexpr (BITS == 4) {
            w = scaled(half_at<WORD, BYTE>(), PART);
        } else {
            w = scaled(number_at<8, WORD, BYTE>(), PART);
        }
        if constexpr (SCALE != Dtype::F32 && SCALE != DTYPE) w = rounded<RANGE, SCALE>(w);
        return w;
    }
};

#define SCALED(N)                                  \
    using N##_F32 = Scaled<Number::N, Dtype::F32>; \
    using N##_F16 = Scaled<Number::N, Dtype::F16>; \
    using N##_BF16 = Scaled<Number::N, Dtype::BF16>;
SCALED(FP8) SCALED(int8) SCALED(uint8) SCALED(uint4) SCALED(E2M1)

template <class Format>
struct IsScaled : std::false_type {};
template <Number NUMBER, Dtype SCALE>
struct IsScaled<Scaled<NUMBER, SCALE>> : std::true_type {};

// --- products

// Rows of a matrix that are wanted next, in two pieces of `nbytes`.
struct Ahead {
    Bytes pieces[2];
    long nbytes, at;
    INLINE void fetch(long step) {
        for (long end = at + step < nbytes ? at + step : nbytes; at < end; at += 64)
            __builtin_prefetch(pieces[0] + at, 0, 2), __builtin_prefetch(pieces[1] + at, 0, 2);
    }
};

INLINE void pause() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

using Done = std::atomic<uint8_t>;

// Columns of x that other threads may still be writing, HALF_PANEL at a time in ascending order, to be waited for.
struct Arriving {
    const Done *next, *last;
    INLINE void wait(long columns) {
        for (; next < last && columns > 0; ++next, columns -= HALF_PANEL)
            while (!next->load(std::memory_order_acquire)) pause();
    }
};

// Sums of R rows x with V vectors of rows of a matrix, the first ones of each row of [R, PANEL]. Behind the columns x
// has zeros up to a whole number of steps. Returns whether the bits are right, as they always are of scaled weights.
template <class Format, int R, int V>
INLINE bool product(
    const Bytes* rows, const Matrix& matrix, const float* const* x, Arriving& arriving, float* sums, Ahead& ahead
) {
    constexpr int GROUPS = Format::STEP / Format::GROUP;
    constexpr bool UNSCALED = std::is_same<Format, UnscaledMXFP4>::value;
    F totals[R][V] = {};
    Format panel[V];
    uint8_t rest[V * LANES][16];
    Bytes from[V * LANES];
    const long steps = (matrix.columns + Format::STEP - 1) / Format::STEP;
    const long groups = (matrix.columns + Format::GROUP - 1) / Format::GROUP;
    const long piece = ahead.nbytes / (groups * (PANEL / LANES / V)) + 1;  // evenly over the parts of a panel
    for (long step = 0; step < steps; ++step) {
        if (!std::is_base_of<Blocks, Format>::value && (step + 1) * Format::STEP > matrix.columns) {
            std::memset(rest, 0, sizeof rest);
            for (int i = 0; i < V * LANES; ++i) {
                std::memcpy(rest[i], rows[i] + step * 16, matrix.row_bytes - step * 16);
                from[i] = rest[i] - step * 16;
            }
            rows = from;
        }
        unrolled<V>([&](auto v) __attribute__((always_inline)) {
            if constexpr (IsScaled<Format>::value)
                panel[v].open(rows + v * LANES, matrix, step);
            else
                panel[v].open(rows + v * LANES, matrix.blocks, step);
        });
        const long column = step * Format::STEP, left = matrix.columns - column;
        arriving.wait(Format::STEP);
        for (int group = 0; group < GROUPS && group * Format::GROUP < left; ++group) {
            ahead.fetch(piece);
            unrolled<V>([&](auto v) __attribute__((always_inline)) {
                if constexpr (UNSCALED)
                    unrolled<R>([&, by = panel[v].group(group)](auto r) __attribute__((always_inline)) {
                        totals[r][v] *= by;
                    });
                else
                    panel[v].group(group);
            });
            const long at = column + group * Format::GROUP;
            unrolled<Format::GROUP>([&](auto k) __attribute__((always_inline)) {
                F each[R];
                unrolled<R>([&](auto r) __attribute__((always_inline)) { each[r] = number(x[r][at + k]); });
                unrolled<V>([&](auto v) __attribute__((always_inline)) {
                    F weight = panel[v].template weight<k>();
                    if constexpr (!Format::is_exact(DTYPE)) weight = rounded<Format::RANGE>(weight);
                    unrolled<R>([&](auto r) __attribute__((always_inline)) {
                        totals[r][v] = fma(each[r], weight, totals[r][v]);
                    });
                });
            });
        }
    }
    bool is_right = true;
    for (int v = 0; v < V; ++v) {
        if constexpr (UNSCALED) is_right = is_right && panel[v].was_in_range();
        for (int r = 0; r < R; ++r) {
            if constexpr (UNSCALED) totals[r][v] *= panel[v].end();
            store(sums + r * PANEL + v * LANES, totals[r][v]);
        }
    }
    return is_right;
}

// Of a whole panel, as many vectors at a time as hide that a multiply-add takes four cycles, in which eight others could
// begin, if sums of R rows leave registers for them.
template <class Format, int R>
void panel_product(
    const Bytes* rows, const Matrix& matrix, const float* const* x, Arriving& arriving, float* sums, Ahead& ahead
) {
    constexpr int V = LANES == 8 && R > 2 ? 2 : 4;
    bool in_range = true;
    for (int v = 0; v < PANEL / LANES; v += V) {
        if constexpr (std::is_same<Format, MXFP4>::value && Format::is_exact(DTYPE)) {
            using Unscaled = UnscaledMXFP4;
            const bool is_right =
                in_range && product<Unscaled, R, V>(rows + v * LANES, matrix, x, arriving, sums + v * LANES, ahead);
            for (int r = 0; r < R && !v; ++r)  // all of x is there
                in_range = in_range && Unscaled::takes(x[r], matrix.columns);
            if (is_right && in_range) continue;
        }
        product<Format, R, V>(rows + v * LANES, matrix, x, arriving, sums + v * LANES, ahead);
    }
}

using Product = void (*)(const Bytes*, const Matrix&, const float* const*, Arriving&, float*, Ahead&);

// Of one row, two, and three or four.
#define PRODUCTS(F) {panel_product<F, 1>, panel_product<F, 2>, panel_product<F, ROWS>},
const Product ENCODINGS[][3] = {FORMATS(PRODUCTS)};

// --- activation

INLINE F exponential(F x) {
    x = where(x < -87.0f, number(-87.0f), where(x > 88.0f, number(88.0f), x));
    F scaled = fma(x, number(1.44269504088896341f), number(0.5f));
    F n = __builtin_convertvector(__builtin_convertvector(scaled, I), F);
    n += __builtin_convertvector(n > scaled, F);  // true is -1
    F r = fma(n, number(2.12194440e-4f), fma(n, number(-0.693359375f), x));
    F power = number(1.9875691500e-4f);
    for (float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f,
                       1.0f})
        power = fma(power, r, number(term));
    return power * (F)((__builtin_convertvector(n, I) + 127) << 23);
}

struct Experts {
    int64_t hidden, inner;
    Matrix gate_up, down;  // gates first
    const float *gate_up_bias, *down_bias;
    float limit, alpha;
    int32_t limited;
};

INLINE F gated(F gate, F up, const Experts& experts) {
    if (!experts.limited) return rounded(rounded(gate / (1 + exponential(-gate))) * up);
    F limit = number(experts.limit);
    gate = where(gate > limit, limit, gate);
    up = where(up > limit, limit, where(up < -limit, -limit, up));
    return rounded((up + 1) * (gate / (1 + exponential(gate * -experts.alpha))));
}

// --- threads

using Clock = std::chrono::steady_clock;
// Waking threads takes 50 us: those that compute stay awake for layers that miss nothing, and who waits for one layer.
constexpr auto AWAKE = std::chrono::milliseconds(5), AWAIT = std::chrono::milliseconds(2);
// Between looks at what devices ask for: for so long behind the last news, and later.
constexpr auto LATELY = std::chrono::seconds(1);
constexpr auto NAP = std::chrono::microseconds(50), LONG_NAP = std::chrono::microseconds(5000);

// What is asked for: tasks are the panels of the first matrices of all experts, and then those of the second ones.
struct Job {
    Experts experts;
    long num_chosen, row_stride, inner_stride, first_panels, second_panels, num_tasks;
    std::vector<Bytes> blocks;             // by expert
    std::vector<int64_t> experts_wanted;   // likewise, their numbers
    std::vector<long> starts, rows;        // where an expert's rows, token * num_chosen + choice, begin
    std::vector<float> x, h;               // [tokens, row_stride], and [rows, inner_stride] in the order of `rows`
    std::vector<Done> panels_done;         // first ones, by expert
    void* y;
};

// Keeps signals from threads that are started meanwhile: they are for those that Python knows.
struct WithoutSignals {
    sigset_t before;

    WithoutSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
    }

    ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before, nullptr); }
};

class Pool {
  public:
    Pool(int threads, const int32_t* cores) {
        workers.reserve(threads);
        try {
            for (int i = 0; i < threads; ++i) {
                workers.emplace_back([this] { work(); });
                cpu_set_t core;
                CPU_ZERO(&core);
                CPU_SET(cores[i], &core);
                pthread_setaffinity_np(workers.back().native_handle(), sizeof core, &core);
            }
        } catch (const std::system_error&) {
            refused = true;
        }
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stopped = true;
            generation.fetch_add(1);
        }
        woken.notify_all();
        for (std::thread& worker : workers) worker.join();
    }

    bool refused = false;

    // Computes some experts, and returns how many seconds that took. All but weights and biases is read before any is.
    double compute(const Experts& experts, const void* x, long tokens, const int64_t* choices, long num_chosen,
                   const int64_t* wanted, const Bytes* blocks, long count, void* y) {
        submit(experts, x, tokens, choices, num_chosen, wanted, blocks, count, y);
        return wait();
    }

  private:
    void submit(const Experts& experts, const void* x, long tokens, const int64_t* choices, long num_chosen,
                const int64_t* wanted, const Bytes* blocks, long count, void* y) {
        while (inside.load(std::memory_order_acquire)) pause();  // some may still find that nothing is left of the last
        job.experts = experts, job.num_chosen = num_chosen, job.y = y;
        job.blocks.assign(blocks, blocks + count);
        job.experts_wanted.assign(wanted, wanted + count);
        job.starts.assign(1, 0), job.rows.clear();
        for (long e = 0; e < count; ++e) {
            for (long row = 0; row < tokens * num_chosen; ++row)
                if (choices[row] == wanted[e]) job.rows.push_back(row);
            job.starts.push_back(job.rows.size());
        }
        job.row_stride = (experts.hidden + MOST - 1) / MOST * MOST;
        job.inner_stride = (experts.inner + MOST - 1) / MOST * MOST;
        job.x.assign(tokens * job.row_stride, 0), job.h.assign(job.rows.size() * job.inner_stride, 0);
        for (long token = 0; token < tokens; ++token) widen(x, token, experts.hidden);
        job.first_panels = (experts.inner + HALF_PANEL - 1) / HALF_PANEL;
        job.second_panels = (experts.hidden + PANEL - 1) / PANEL;
        job.num_tasks = count * (job.first_panels + job.second_panels);
        if ((long)job.panels_done.size() < count * job.first_panels)
            job.panels_done = std::vector<Done>(count * job.first_panels);
        for (auto& done : job.panels_done) done.store(0, std::memory_order_relaxed);
        next.store(0, std::memory_order_relaxed), remaining.store(job.num_tasks, std::memory_order_relaxed);
        began = ended = Clock::now();
        done.store(!job.num_tasks, std::memory_order_relaxed);
        inside.store(workers.size(), std::memory_order_relaxed);
        generation.fetch_add(1);
        if (sleepers.load()) {
            { std::lock_guard<std::mutex> lock(mutex); }
            woken.notify_all();
        }
    }

    double wait() {
        auto since = Clock::now();  // a layer's experts take less than it takes to wake up
        for (int i = 0; !done.load(std::memory_order_acquire) && (i % 64 || Clock::now() - since < AWAIT); ++i) pause();
        std::unique_lock<std::mutex> lock(mutex);
        finished.wait(lock, [this] { return done.load(std::memory_order_acquire); });
        return std::chrono::duration<double>(ended - began).count();
    }

    Job job;
    std::vector<std::thread> workers;
    std::atomic<uint64_t> generation{0};
    std::atomic<long> next{0}, remaining{0}, inside{0}, sleepers{0};
    std::atomic<bool> done{true};
    std::mutex mutex;
    std::condition_variable woken, finished;
    Clock::time_point began, ended;
    bool stopped = false;

    void widen(const void* x, long token, long hidden) {
        constexpr int SIZE = DTYPE == Dtype::F32 ? 4 : 2;
        float* to = job.x.data() + token * job.row_stride;
        Bytes from = (Bytes)x + token * hidden * SIZE;
        long column = 0;
        for (; column + LANES <= hidden; column += LANES) store(to + column, widened(from + column * SIZE));
        uint8_t rest[4 * LANES] = {};
        std::memcpy(rest, from + column * SIZE, (hidden - column) * SIZE);
        F last = widened(rest);
        std::memcpy(to + column, &last, (hidden - column) * 4);
    }

    void work() {
        uint64_t seen = 0;
        for (;;) {
            auto since = Clock::now();
            for (int i = 0; generation.load(std::memory_order_acquire) == seen; ++i) {
                pause();
                if (i % 64 || Clock::now() - since < AWAKE) continue;
                std::unique_lock<std::mutex> lock(mutex);
                sleepers.fetch_add(1);
                woken.wait(lock, [&] { return generation.load() != seen; });
                sleepers.fetch_sub(1);
            }
            seen = generation.load(std::memory_order_acquire);
            if (stopped) return;
            for (long task = next.fetch_add(1), following; task < job.num_tasks; task = following) {
                following = next.fetch_add(1);  // claimed already, to be fetched meanwhile
                run(task, following);
                if (remaining.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                    std::lock_guard<std::mutex> lock(mutex);
                    ended = Clock::now();
                    done.store(true, std::memory_order_release);
                    finished.notify_all();
                }
            }
            inside.fetch_sub(1, std::memory_order_release);
        }
    }

    // What a task multiplies: rows of an expert's matrix from `start` on, and as many from `second` on.
    struct Place {
        bool first;
        long expert, start, second;
        const Matrix& matrix;
        Bytes data;
    };

    Place place(long task) const {
        const Experts& all = job.experts;
        long firsts = job.first_panels * (long)job.blocks.size(), rest = task - firsts;
        if (task < firsts) {
            long expert = task / job.first_panels, start = task % job.first_panels * HALF_PANEL;
            return {true, expert, start, all.inner + start, all.gate_up, job.blocks[expert] + all.gate_up.offset};
        }
        long expert = rest / job.second_panels, start = rest % job.second_panels * PANEL;
        return {false, expert, start, start + HALF_PANEL, all.down, job.blocks[expert] + all.down.offset};
    }

    Ahead ahead(long task) const {
        if (task >= job.num_tasks) return {};
        Place there = place(task);
        long row = there.matrix.row_bytes;
        return {{there.data + there.start * row, there.data + there.second * row}, HALF_PANEL * row, 0};
    }

    void run(long task, long following) {
        Place here = place(task);
        const Experts& all = job.experts;
        Done* done = job.panels_done.data() + here.expert * job.first_panels;
        Arriving arriving{done, here.first ? done : done + job.first_panels};
        Bytes rows[PANEL];
        long height = here.first ? all.inner : all.hidden, indices[PANEL];
        for (int i = 0; i < PANEL; ++i) {  // what lies behind the last row reads that row
            long within = here.start + (here.first ? i % HALF_PANEL : i);
            indices[i] = (within < height ? within : height - 1) + (here.first ? i / HALF_PANEL * all.inner : 0);
            rows[i] = here.data + indices[i] * here.matrix.row_bytes;
        }
        Ahead fetched = ahead(following);
        const float* bias = here.first ? all.gate_up_bias : all.down_bias;
        if (bias) bias += job.experts_wanted[here.expert] * (here.first ? 2 * all.inner : all.hidden);
        for (long at = job.starts[here.expert], end = job.starts[here.expert + 1]; at < end; at += ROWS) {
            long count = end - at < ROWS ? end - at : ROWS;
            const float* x[ROWS];
            for (long r = 0; r < ROWS; ++r) {
                long row = r < count ? at + r : at;
                x[r] = here.first ? job.x.data() + job.rows[row] / job.num_chosen * job.row_stride
                                  : job.h.data() + row * job.inner_stride;
            }
            alignas(64) float sums[ROWS][PANEL];
            ENCODINGS[here.matrix.encoding][count < 3 ? count - 1 : 2](
                rows, here.matrix, x, arriving, sums[0], fetched);
            for (long r = 0; r < count; ++r) {
                if (bias)
                    for (int i = 0; i < PANEL; ++i) sums[r][i] += bias[indices[i]];
                finish(here, at + r, sums[r]);
            }
        }
        if (here.first) done[here.start / HALF_PANEL].store(1, std::memory_order_release);
    }

    void finish(const Place& here, long row, float* sums) {
        for (int i = 0; i < PANEL; i += LANES) store(sums + i, rounded(load<F>(sums + i)));
        if (!here.first) {
            long left = job.experts.hidden - here.start;
            store_results(sums, left < PANEL ? left : PANEL, job.y, job.rows[row] * job.experts.hidden + here.start);
            return;
        }
        for (int i = 0; i < HALF_PANEL; i += LANES)
            store(sums + i, gated(load<F>(sums + i), load<F>(sums + HALF_PANEL + i), job.experts));
        long left = job.experts.inner - here.start;  // behind the last column there are zeros
        float* h = job.h.data() + row * job.inner_stride + here.start;
        std::memcpy(h, sums, 4 * (left < HALF_PANEL ? left : HALF_PANEL));
    }
};

// A layer's experts, where they lie, and how many of them a token has.
struct Layer {
    Experts experts;
    int64_t num_chosen;
    Bytes first;  // expert
    int64_t step, bytes;
};

// What a device asks for and shows, and where it finds results: experts_cpu.py and expert_buffers.py say more.
struct Mailbox {
    const int64_t* report;
    const uint8_t* x;
    uint8_t* y;
    int32_t* ready;
    const Layer* layers;
    int64_t* total;  // bytes and nanoseconds
    int32_t seen;  // ticket
};

// A thread that looks at what devices ask for, the more often the shorter ago there were news, and others that compute
// it. It never stops, as a device may have to do other things first, such as a prompt, and would wait for ever.
class Watcher {
  public:
    explicit Watcher(std::unique_ptr<Pool> threads) : pool(std::move(threads)), thread([this] { watch(); }) {}

    ~Watcher() {
        wake([this] { stopped = true; });
        thread.join();
        for (Mailbox* mailbox : mailboxes) __atomic_store_n(mailbox->ready, -1, __ATOMIC_RELEASE);  // none waits for ever
    }

    void add(Mailbox* mailbox) {
        wake([&] { mailboxes.push_back(mailbox); });
    }

    template <typename Change>
    void wake(Change change) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            change();
            is_woken = true;
        }
        woken.notify_all();
    }

    const std::unique_ptr<Pool> pool;

  private:
    std::vector<Mailbox*> mailboxes;
    std::vector<int64_t> choices, wanted;
    std::vector<Bytes> blocks;
    std::mutex mutex;
    std::condition_variable woken;
    bool stopped = false, is_woken = false;
    std::thread thread;

    void watch() {
        std::unique_lock<std::mutex> lock(mutex);
        for (auto active = Clock::now(); !stopped;) {
            for (size_t i = 0; i < mailboxes.size(); ++i) {
                Mailbox& mailbox = *mailboxes[i];
                if (read(mailbox.report) >> 32 == mailbox.seen) continue;
                lock.unlock();
                serve(mailbox);
                lock.lock();
                is_woken = true;
            }
            if (is_woken) active = Clock::now(), is_woken = false;
            auto since = Clock::now() - active;
            if (since >= AWAKE) {
                woken.wait_for(lock, since < LATELY ? NAP : LONG_NAP, [this] { return is_woken; });
                continue;
            }
            lock.unlock();
            pause();
            lock.lock();
        }
    }

    // What a device has written, before all that it wrote earlier is read.
    static int64_t read(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

    void serve(Mailbox& mailbox) {
        int64_t header = read(mailbox.report), ticket = header >> 32, tokens = header & 0xFFFF;
        const Layer& layer = mailbox.layers[header >> 16 & 0xFFFF];
        choices.assign(tokens * layer.num_chosen, 0), wanted.clear(), blocks.clear();
        for (size_t i = 0; i < choices.size(); ++i) {
            int64_t word;
            while ((word = read(mailbox.report + 1 + i)) >> 32 != ticket) {
                if (read(mailbox.report) != header) return;  // the next pass writes over what an interrupted one has asked
                pause();
            }
            choices[i] = word & 0x7FFFFFFF;
            if (word >> 31 & 1 && std::find(wanted.begin(), wanted.end(), choices[i]) == wanted.end())
                wanted.push_back(choices[i]);
        }
        for (int64_t expert : wanted) blocks.push_back(layer.first + expert * layer.step);
        double seconds = pool->compute(layer.experts, mailbox.x, tokens, choices.data(), layer.num_chosen, wanted.data(),
                                       blocks.data(), wanted.size(), mailbox.y);
        mailbox.seen = ticket;
        mailbox.total[0] += wanted.size() * layer.bytes, mailbox.total[1] += (int64_t)(seconds * 1e9);
        __atomic_store_n(mailbox.ready, (int32_t)ticket, __ATOMIC_RELEASE);
    }
};

}  // namespace

extern "C" {

const char* experts_instructions() {
#if defined(WITH_AVX512)
    return "AVX-512";
#elif defined(WITH_AVX2)
    return "AVX2";
#else
    return "plain C++";
#endif
}

// Threads, each pinned to a core, and one that serves devices, or null.
void* experts_start(int threads, const int32_t* cores) try {
    WithoutSignals blocked;
    auto pool = std::make_unique<Pool>(threads, cores);
    return pool->refused ? nullptr : new Watcher(std::move(pool));
} catch (const std::exception&) {
    return nullptr;
}

void experts_stop(void* threads) { delete (Watcher*)threads; }

// Returns the seconds, or less than none where there is no memory for it; not while devices are served.
double experts_compute(void* threads, const Experts* experts, const void* x, int64_t tokens, const int64_t* choices,
                       int64_t num_chosen, const int64_t* wanted, const uint8_t* const* blocks, int64_t count,
                       void* y) try {
    return ((Watcher*)threads)->pool->compute(*experts, x, tokens, choices, num_chosen, wanted, blocks, count, y);
} catch (const std::bad_alloc&) {
    return -1;
}

void experts_add_mailbox(void* threads, Mailbox* mailbox) { ((Watcher*)threads)->add(mailbox); }

// Devices may soon ask for something.
void experts_wake(void* threads) {
    ((Watcher*)threads)->wake([] {});
}
}
