// The registers of wgmma's D, for instructions of any number of columns: their places in the
// instruction, and themselves, as operands of kind r.
#pragma once

#define NANOVLLM_4(r, d, i) r((d)[i]), r((d)[i + 1]), r((d)[i + 2]), r((d)[i + 3])
#define NANOVLLM_8(r, d, i) NANOVLLM_4(r, d, i), NANOVLLM_4(r, d, i + 4)
#define NANOVLLM_16(r, d, i) NANOVLLM_8(r, d, i), NANOVLLM_8(r, d, i + 8)
#define NANOVLLM_32(r, d, i) NANOVLLM_16(r, d, i), NANOVLLM_16(r, d, i + 16)
#define NANOVLLM_64(r, d, i) NANOVLLM_32(r, d, i), NANOVLLM_32(r, d, i + 32)
#define NANOVLLM_D4 "%0, %1, %2, %3"
#define NANOVLLM_D8 NANOVLLM_D4 ", %4, %5, %6, %7"
#define NANOVLLM_D12 NANOVLLM_D8 ", %8, %9, %10, %11"
#define NANOVLLM_D16 NANOVLLM_D12 ", %12, %13, %14, %15"
#define NANOVLLM_D24 NANOVLLM_D16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NANOVLLM_D32 NANOVLLM_D24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NANOVLLM_D40 NANOVLLM_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NANOVLLM_D48 NANOVLLM_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NANOVLLM_D56 NANOVLLM_D48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NANOVLLM_D64 NANOVLLM_D56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define NANOVLLM_D72 NANOVLLM_D64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NANOVLLM_D80 NANOVLLM_D72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define NANOVLLM_D88 NANOVLLM_D80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define NANOVLLM_D96 NANOVLLM_D88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define NANOVLLM_D104 NANOVLLM_D96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define NANOVLLM_D112 NANOVLLM_D104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define NANOVLLM_D120 NANOVLLM_D112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define NANOVLLM_D128 NANOVLLM_D120 ", %120, %121, %122, %123, %124, %125, %126, %127"
