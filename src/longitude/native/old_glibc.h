/* For wheels, whose loops are to run with any glibc that torch runs with: functions under the names that they have had from the
   start. Newer names differ in errno alone. */
#if defined(__x86_64__)
#define FIRST_NAME(function) __asm__(".symver " #function ", " #function "@GLIBC_2.2.5")
#elif defined(__aarch64__)
#define FIRST_NAME(function) __asm__(".symver " #function ", " #function "@GLIBC_2.17")
#endif
FIRST_NAME(exp);
FIRST_NAME(log2);
