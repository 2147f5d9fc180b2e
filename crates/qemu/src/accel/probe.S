/* The guest of the KVM probe. It does what the first milliseconds of a 64-bit kernel do, reports
 * each step on port 0xe9 and exits through isa-debug-exit at 0xf4 with 0x2a (QEMU then exits with
 * 0x2a * 2 + 1 = 85).
 *
 * Built into probe.bin, a flat multiboot image loaded at 1 MiB, by
 *     as --64 -o probe.o probe.S && ld -m elf_x86_64 -Ttext=0x100000 -e entry \
 *         --oformat binary -o probe.bin probe.o
 *
 * Steps: a start in 32-bit protected mode; b long mode with paging; c upper half of the address
 * space; d GDT, TSS and MSRs; e a breakpoint taken and returned from; f a page fault repaired;
 * g a timer interrupt out of hlt; h user mode by iretq, back by an interrupt; i user mode again,
 * back by syscall; j SSE registers kept.
 */
    .set BASE, 0x100000
    .set UPPER, 0xffffffff80000000      /* where a Linux kernel runs */
    .set PAGE_TABLES, 0x300000          /* PML4, PDPT lower, PDPT upper, PD: 4 pages */
    .set PAGE_DIRECTORY, PAGE_TABLES + 0x3000
    .set IDT, 0x310000
    .set TSS, 0x320000
    .set STACK_TOP, 0x280000
    .set INTERRUPT_STACK_TOP, 0x2a0000
    .set USER_STACK_TOP, 0x2c0000
    .set ABSENT, 0x3fe00000             /* last 2 MiB of the first GiB: mapped by the page fault */
    .set MULTIBOOT_FLAGS, 0x00010000    /* the load addresses are in this header */

    .macro step letter
    mov $\letter, %al
    out %al, $0xe9
    .endm

    .macro gate vector, handler, type   /* an IDT entry; handlers have upper-half addresses */
    mov $\handler, %rax
    mov $IDT + 16 * \vector, %edi
    mov %ax, (%rdi)
    movw $0x08, 2(%rdi)
    movw $\type << 8, 4(%rdi)
    shr $16, %rax
    mov %ax, 6(%rdi)
    shr $16, %rax
    mov %eax, 8(%rdi)
    .endm

    .macro write_msr number, low, high
    mov $\number, %ecx
    mov $\low, %eax
    mov $\high, %edx
    wrmsr
    .endm

    .text
    .code32
header:
    .long 0x1badb002, MULTIBOOT_FLAGS, -(0x1badb002 + MULTIBOOT_FLAGS)
    .long header, BASE, 0, 0, entry

    .globl entry
entry:
    cli
    cld
    mov $STACK_TOP, %esp
    step 'a'
    mov $PAGE_TABLES, %edi              /* page tables, IDT and TSS start as zeroes */
    xor %eax, %eax
    mov $(TSS + 0x1000 - PAGE_TABLES) / 4, %ecx
    rep stosl
    movl $PAGE_TABLES + 0x1007, PAGE_TABLES             /* present, writable, user */
    movl $PAGE_TABLES + 0x2007, PAGE_TABLES + 511 * 8
    movl $PAGE_DIRECTORY + 7, PAGE_TABLES + 0x1000
    movl $PAGE_DIRECTORY + 7, PAGE_TABLES + 0x2000 + 510 * 8
    mov $PAGE_DIRECTORY, %edi
    mov $0x87, %eax                     /* 2 MiB pages of the first GiB, but for the last one */
    mov $511, %ecx
1:  mov %eax, (%edi)
    add $0x200000, %eax
    add $8, %edi
    loop 1b
    mov %cr4, %eax
    or $0x6a0, %eax                     /* PAE, PGE, OSFXSR, OSXMMEXCPT */
    mov %eax, %cr4
    mov $PAGE_TABLES, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx               /* EFER: SYSCALL and long mode */
    rdmsr
    or $0x101, %eax
    wrmsr
    mov %cr0, %eax
    and $~4, %eax                       /* no emulation: SSE is used */
    or $0x80010002, %eax                /* paging, write protection, monitor coprocessor */
    mov %eax, %cr0
    lgdt gdt_pointer_low
    ljmp $0x08, $long_mode

    .code64
long_mode:
    step 'b'
    mov $upper + UPPER, %rax
    jmp *%rax
upper:
    step 'c'
    mov $gdt_pointer_upper, %eax        /* the descriptor tables again, by the upper half */
    lgdt (%rax)
    mov $0x10, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    mov $STACK_TOP + UPPER, %rsp
    movl $INTERRUPT_STACK_TOP, TSS + 4  /* RSP0 */
    movw $0x68, TSS + 0x66              /* no I/O permission map */
    mov $0x30, %eax
    ltr %ax
    gate 3, breakpoint + UPPER, 0xee
    gate 14, page_fault + UPPER, 0x8e
    gate 32, timer + UPPER, 0x8e
    mov $idt_pointer, %eax
    lidt (%rax)
    write_msr 0xc0000081, 0, 0x00180008                 /* STAR: SYSRET and SYSCALL selectors */
    write_msr 0xc0000084, 0x200, 0                      /* SFMASK: interrupts off */
    mov $syscall_entry + UPPER, %rax
    mov %rax, %rdx
    shr $32, %rdx
    mov $0xc0000082, %ecx                               /* LSTAR */
    wrmsr
    write_msr 0xc0000102, 0x12345678, 0                 /* KERNEL_GS_BASE, into use by SWAPGS */
    swapgs
    mov $0xc0000101, %ecx                               /* GS_BASE */
    rdmsr
    cmp $0x12345678, %eax
    jne fail
    mov %cr3, %rax
    mov %rax, %cr3
    step 'd'

    xor %ebx, %ebx
    int3
    cmp $1, %ebx
    jne fail
    step 'e'

    mov $ABSENT, %r12d
    movl $0x600dcafe, (%r12)
    cmpl $0x600dcafe, 0x600000          /* where the handler mapped it */
    jne fail
    step 'f'

    mov $0x11, %al                      /* both PICs from vector 32 on, only the timer unmasked */
    out %al, $0x20
    out %al, $0xa0
    mov $0x20, %al
    out %al, $0x21
    mov $0x28, %al
    out %al, $0xa1
    mov $4, %al
    out %al, $0x21
    mov $2, %al
    out %al, $0xa1
    mov $1, %al
    out %al, $0x21
    out %al, $0xa1
    mov $0xfe, %al
    out %al, $0x21
    mov $0xff, %al
    out %al, $0xa1
    mov $0x34, %al                      /* timer 0: rate generator at 1 kHz */
    out %al, $0x43
    mov $0xa9, %al
    out %al, $0x40
    mov $0x04, %al
    out %al, $0x40
    xor %r13d, %r13d
1:  sti
    hlt
    cli
    cmp $3, %r13d
    jb 1b
    mov $0xff, %al
    out %al, $0x21
    step 'g'

    mov $USER_STACK_TOP, %r14d
    mov $user_interrupt, %r15d
    jmp to_user
after_interrupt:
    step 'h'
    mov $user_syscall, %r15d
    jmp to_user
syscall_entry:                          /* RCX holds where user mode was */
    mov $STACK_TOP + UPPER, %rsp
    mov $user_syscall_end, %eax
    cmp %rax, %rcx
    jne fail
    step 'i'

    mov $0x0123456789abcdef, %rax
    movq %rax, %xmm7
    pshufd $0x44, %xmm7, %xmm8
    mov $STACK_TOP - 64, %edi
    movaps %xmm8, (%rdi)
    cmp %rax, 8(%rdi)
    jne fail
    step 'j'
    mov $0x2a, %al
    out %al, $0xf4
fail:
    mov $0x0f, %al
    out %al, $0xf4
1:  hlt
    jmp 1b

to_user:                                /* goes to R15 in user mode on the stack R14 */
    push $0x23
    push %r14
    push $0x02
    push $0x2b
    push %r15
    iretq

user_interrupt:
    mov $0x5e, %ebx
    int3
user_syscall:
    syscall
user_syscall_end:

breakpoint:
    cmp $0x5e, %ebx
    je 1f
    inc %ebx
    iretq
1:  mov %cs, %eax                       /* from user mode: the frame says so */
    testb $3, 8(%rsp)
    jz fail
    mov $STACK_TOP + UPPER, %rsp
    jmp after_interrupt

page_fault:
    mov %cr2, %rax
    cmp %r12, %rax
    jne fail
    movl $0x600087, PAGE_DIRECTORY + 511 * 8
    invlpg (%rax)
    add $8, %rsp                        /* the error code */
    iretq

timer:
    inc %r13d
    push %rax
    mov $0x20, %al
    out %al, $0x20
    pop %rax
    iretq

    .balign 8
gdt:
    .quad 0
    .quad 0x00af9b000000ffff            /* 08 kernel code */
    .quad 0x00cf93000000ffff            /* 10 kernel data */
    .quad 0                             /* 18 user code of 32 bits: unused */
    .quad 0x00cff3000000ffff            /* 20 user data */
    .quad 0x00affb000000ffff            /* 28 user code */
    .quad 0x0000890000000067 + ((TSS & 0xffffff) << 16)  /* 30 TSS */
    .quad 0
gdt_end:
gdt_pointer_low:
    .word gdt_end - gdt - 1
    .long gdt
gdt_pointer_upper:
    .word gdt_end - gdt - 1
    .quad gdt + UPPER
idt_pointer:
    .word 16 * 33 - 1
    .quad IDT + UPPER
