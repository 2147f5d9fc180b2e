/* Guest without an operating system, for a KVM that cannot run a 64-bit Linux: dirties 64 MiB
 * forever and checks itself. Loaded by QEMU's -kernel as multiboot, runs flat in 32-bit protected
 * mode, never halts.
 *
 * Sweep number g writes g at the start of each page and g ^ address at its end, after checking that
 * both still hold sweep g-1. Output on the serial line: "." each 16 sweeps, a line "G xxxxxxxx"
 * (the sweep, hexadecimal) each 64 sweeps, "BAD xxxxxxxx" with the address of the first wrong page.
 * Sweeps continue after that.
 *
 * ebp = number of this sweep, edi = page, ecx = pages left, esi = non-zero once a page was wrong.
 */
#define FIRST_PAGE  0x01000000
#define PAGES       16384
#define PAGE_BYTES  4096
#define LAST_WORD   (PAGE_BYTES - 4)
#define SERIAL      0x3f8
#define LINE_STATUS (SERIAL + 5)
#define STACK       0x00080000

#define MULTIBOOT_MAGIC 0x1badb002
/* bit 16: the addresses are given here; bit 0: modules page-aligned */
#define MULTIBOOT_FLAGS 0x00010001
#define LOAD_ADDRESS    0x00100000

        .code32
        .section .multiboot, "a"
        .align 4
header: .long MULTIBOOT_MAGIC, MULTIBOOT_FLAGS, -(MULTIBOOT_MAGIC + MULTIBOOT_FLAGS)
        .long header, LOAD_ADDRESS, 0, 0, _start

        .text
        .globl _start
_start:
        mov     $STACK, %esp
        cld
        xor     %ebp, %ebp
        xor     %esi, %esi

/* Sweep 0: nothing to check yet. */
        mov     $FIRST_PAGE, %edi
        mov     $PAGES, %ecx
first:  movl    $0, (%edi)
        mov     %edi, LAST_WORD(%edi)
        add     $PAGE_BYTES, %edi
        dec     %ecx
        jnz     first
        call    print_sweep

sweep:  mov     %ebp, %ebx              /* what the last sweep wrote */
        inc     %ebp
        mov     $FIRST_PAGE, %edi
        mov     $PAGES, %ecx
page:   cmp     %ebx, (%edi)
        jne     wrong
        mov     %ebx, %eax
        xor     %edi, %eax
        cmp     %eax, LAST_WORD(%edi)
        jne     wrong
write:  mov     %ebp, (%edi)
        mov     %ebp, %eax
        xor     %edi, %eax
        mov     %eax, LAST_WORD(%edi)
        add     $PAGE_BYTES, %edi
        dec     %ecx
        jnz     page

        test    $15, %ebp
        jnz     sweep
        mov     $'.', %al
        call    print
        test    $63, %ebp
        jnz     sweep
        call    print_sweep
        jmp     sweep

wrong:  test    %esi, %esi
        jnz     write
        inc     %esi
        mov     $bad_text, %edx
        mov     %edi, %eax
        call    print_number
        jmp     write

/* Prints the sweep's number. */
print_sweep:
        mov     $sweep_text, %edx
        mov     %ebp, %eax

/* Prints a line: the text at edx (zero-terminated), then eax. Keeps ebx, ecx, esi, edi, ebp. */
print_number:
        push    %ebx
        push    %ecx
        mov     %eax, %ebx
1:      mov     (%edx), %al
        test    %al, %al
        jz      2f
        push    %edx
        call    print
        pop     %edx
        inc     %edx
        jmp     1b
2:      mov     $8, %ecx
3:      rol     $4, %ebx
        mov     %bl, %al
        and     $15, %al
        add     $'0', %al
        cmp     $'9', %al
        jbe     4f
        add     $('a' - '0' - 10), %al
4:      call    print
        dec     %ecx
        jnz     3b
        mov     $'\n', %al
        call    print
        pop     %ecx
        pop     %ebx
        ret

/* Prints al. Waits a limited time for the transmitter, because a line that nobody reads must not
 * stop the guest. Changes eax and edx. */
print:
        push    %ecx
        mov     $10000, %ecx
        mov     %al, %ah
        mov     $LINE_STATUS, %dx
5:      inb     %dx, %al
        test    $0x20, %al
        jnz     6f
        dec     %ecx
        jnz     5b
6:      mov     %ah, %al
        mov     $SERIAL, %dx
        outb    %al, %dx
        pop     %ecx
        ret

bad_text:   .asciz "\nBAD "
sweep_text: .asciz "\nG "
        .section .note.GNU-stack, "", @progbits
