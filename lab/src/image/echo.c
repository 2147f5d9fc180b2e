/* Guest without an operating system that answers packets, for a KVM that cannot run a 64-bit Linux.
 * Loaded by QEMU's -kernel as multiboot; flat 32-bit protected mode. Its NIC is a virtio-net on a
 * root bus, driven through the I/O ports of virtio 0.9.5. It answers ARP requests for ADDRESS and
 * UDP datagrams to its port 7, and halts between interrupts.
 *
 * Each datagram also makes it write PAGES_A_PACKET pages. Sweep g over its memory writes g at the
 * start of each page and g ^ address at its end, after checking that both still hold sweep g-1.
 * Output on the serial line: "G" at the end of each sweep, "BAD" at the first wrong page, "NIC" if
 * it finds none.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define ADDRESS 0x0a580015 /* 10.88.0.21 */
#define ECHO_PORT 7

#define FIRST_PAGE 0x01000000u
#define PAGES 16384u
#define PAGE_BYTES 4096u
#define PAGES_A_PACKET 5

/* The start: the multiboot header, a stack, segments of its own, and the interrupt's entry. An
 * interrupt comes while the guest halts, and the guest goes on with an empty stack: the KVM for which
 * it is made cannot emulate a return from an interrupt. */
asm(".section .multiboot, \"a\"\n"
    ".align 4\n"
    "header: .long 0x1badb002, 0x00010001, -(0x1badb002 + 0x00010001)\n"
    ".long header, 0x00100000, edata, end, _start\n"
    ".text\n"
    ".globl _start\n"
    "_start: mov $0x80000, %esp\n"
    "cld\n"
    "lgdt gdt_pointer\n"
    "ljmp $8, $1f\n"
    "1: mov $16, %eax\n"
    "mov %eax, %ds\n"
    "mov %eax, %es\n"
    "mov %eax, %ss\n"
    "call run\n"
    "2: hlt\n"
    "jmp 2b\n"
    ".globl interrupt\n"
    "interrupt: mov $0x80000, %esp\n"
    "cld\n"
    "call go_on\n"
    ".data\n"
    ".align 8\n"
    "gdt: .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff\n"
    "gdt_pointer: .word 23\n"
    ".long gdt\n"
    ".text\n");

static void out8(u16 port, u8 value) { asm volatile("outb %0, %1" ::"a"(value), "Nd"(port)); }
static void out16(u16 port, u16 value) { asm volatile("outw %0, %1" ::"a"(value), "Nd"(port)); }
static void out32(u16 port, u32 value) { asm volatile("outl %0, %1" ::"a"(value), "Nd"(port)); }

static u8 in8(u16 port)
{
    u8 value;
    asm volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static u16 in16(u16 port)
{
    u16 value;
    asm volatile("inw %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static u32 in32(u16 port)
{
    u32 value;
    asm volatile("inl %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

/* Waits a limited time for the transmitter: a line that nobody reads must not stop the guest. */
static void print(const char *text)
{
    for (; *text; text++) {
        for (int tries = 10000; tries > 0 && !(in8(0x3fd) & 0x20); tries--)
            ;
        out8(0x3f8, (u8)*text);
    }
}

/* ---- Memory ---- */

static u32 sweep, next_page;
static int was_wrong;

static volatile u32 *word(u32 page, u32 at) { return (u32 *)(FIRST_PAGE + page * PAGE_BYTES + at); }

static void write_pages(u32 count)
{
    for (; count > 0; count--) {
        volatile u32 *first = word(next_page, 0), *last = word(next_page, PAGE_BYTES - 4);
        u32 address = (u32)first;
        if (sweep > 0 && (*first != sweep - 1 || *last != ((sweep - 1) ^ address)) && !was_wrong) {
            was_wrong = 1;
            print("\nBAD page\n");
        }
        *first = sweep;
        *last = sweep ^ address;
        if (++next_page == PAGES) {
            next_page = 0;
            sweep++;
            print("\nG sweep\n");
        }
    }
}

/* ---- The NIC: virtio 0.9.5, appendix C ---- */

#define SLOTS 256 /* most entries of a queue here */
#define BUFFER_BYTES 2048
#define HEADER_BYTES 10 /* virtio_net_hdr without merged buffers */

struct descriptor { u32 address, address_high, bytes; u16 flags, next; };
struct available { u16 flags, index, ring[SLOTS]; };
struct used_element { u32 id, bytes; };
struct used { u16 flags, index; struct used_element ring[SLOTS]; };

struct queue {
    u16 number, size, taken;
    struct descriptor *descriptors;
    volatile struct available *available;
    volatile struct used *used;
};

static u8 ring_memory[2][16384] __attribute__((aligned(4096)));
static u8 buffers[2][SLOTS][BUFFER_BYTES];
static struct queue queues[2]; /* 0 receives, 1 sends */
static u16 ports, free_sends;
static u8 mac[6];

static u32 config_read(u32 device, u32 at)
{
    out32(0xcf8, 0x80000000u | device << 11 | at);
    return in32(0xcfc);
}

static void config_write(u32 device, u32 at, u32 value)
{
    out32(0xcf8, 0x80000000u | device << 11 | at);
    out32(0xcfc, value);
}

static void acknowledge(void)
{
    in8(ports + 19);
    out8(0xa0, 0x20);
    out8(0x20, 0x20);
}

static int begin_queue(u16 number)
{
    struct queue *queue = &queues[number];
    out16(ports + 14, number);
    u16 size = in16(ports + 12);
    if (size == 0 || size > SLOTS)
        return 0;
    u8 *memory = ring_memory[number];
    u32 used_at = (16u * size + 6 + 2 * size + 4095) & ~4095u;
    queue->number = number;
    queue->size = size;
    queue->descriptors = (struct descriptor *)memory;
    queue->available = (struct available *)(memory + 16 * size);
    queue->used = (struct used *)(memory + used_at);
    for (u16 slot = 0; slot < size; slot++) {
        queue->descriptors[slot].address = (u32)buffers[number][slot];
        queue->descriptors[slot].bytes = BUFFER_BYTES;
        queue->descriptors[slot].flags = number == 0 ? 2 : 0; /* the device writes */
    }
    out32(ports + 8, (u32)memory >> 12);
    return 1;
}

/* Gives a buffer to the device. */
static void give(struct queue *queue, u16 slot)
{
    queue->available->ring[queue->available->index % queue->size] = slot;
    __sync_synchronize();
    queue->available->index++;
    __sync_synchronize();
}

/* Takes a buffer that the device has used, or returns -1. */
static int take(struct queue *queue)
{
    if (queue->taken == queue->used->index)
        return -1;
    __sync_synchronize();
    return (int)queue->used->ring[queue->taken++ % queue->size].id;
}

static u32 find_nic(void)
{
    for (u32 device = 0; device < 256u * 32 * 8; device++)
        if (config_read(device, 0) == 0x10001af4)
            return device;
    return 0;
}

static int begin_nic(void)
{
    u32 device = find_nic();
    if (device == 0)
        return 0;
    config_write(device, 4, (config_read(device, 4) & 0xffff) | 5); /* I/O, bus master */
    ports = (u16)(config_read(device, 0x10) & 0xfffc);
    u8 line = config_read(device, 0x3c) & 15;

    out8(ports + 18, 0); /* reset */
    out8(ports + 18, 1);
    out8(ports + 18, 3);
    out32(ports + 4, 0); /* no features */
    if (!begin_queue(0) || !begin_queue(1))
        return 0;
    queues[1].available->flags = 1; /* no interrupt for what was sent */
    for (u16 slot = 0; slot < queues[0].size; slot++)
        give(&queues[0], slot);
    free_sends = queues[1].size;
    for (int byte = 0; byte < 6; byte++)
        mac[byte] = in8(ports + 20 + byte);
    out8(ports + 18, 7);
    out16(ports + 16, 0);

    /* Interrupts of the PIC from 0x20 on; only the NIC's is let through. */
    static const u8 words[] = {0x11, 0x20, 4, 1}, second_words[] = {0x11, 0x28, 2, 1};
    for (int word = 0; word < 4; word++) {
        out8(word == 0 ? 0x20 : 0x21, words[word]);
        out8(word == 0 ? 0xa0 : 0xa1, second_words[word]);
    }
    out8(0x21, line < 8 ? (u8)~(1 << line) : 0xfb);
    out8(0xa1, line < 8 ? 0xff : (u8)~(1 << (line - 8)));
    return 1;
}

static void begin_interrupts(void)
{
    extern void interrupt(void);
    static u16 gates[48][4];
    static struct { u16 limit; u32 base; } __attribute__((packed)) pointer;
    u32 entry = (u32)interrupt;
    for (int gate = 32; gate < 48; gate++) {
        gates[gate][0] = entry & 0xffff;
        gates[gate][1] = 8;
        gates[gate][2] = 0x8e00;
        gates[gate][3] = entry >> 16;
    }
    pointer.limit = sizeof gates - 1;
    pointer.base = (u32)gates;
    asm volatile("lidt %0" ::"m"(pointer));
}

/* ---- Packets ---- */

static u16 get16(const u8 *at) { return (u16)(at[0] << 8 | at[1]); }
static u32 get32(const u8 *at) { return (u32)get16(at) << 16 | get16(at + 2); }

static void copy(u8 *to, const u8 *from, u32 bytes)
{
    while (bytes-- > 0)
        *to++ = *from++;
}

static void put32(u8 *at, u32 value)
{
    for (int byte = 3; byte >= 0; byte--, value >>= 8)
        at[byte] = (u8)value;
}

static void swap(u8 *one, u8 *other, u32 bytes)
{
    for (; bytes > 0; bytes--, one++, other++) {
        u8 kept = *one;
        *one = *other;
        *other = kept;
    }
}

/* Turns a packet into its answer. Returns 0 if there is none. */
static int answer(u8 *packet, u32 bytes)
{
    if (bytes >= 42 && get16(packet + 12) == 0x0806) {
        if (get16(packet + 20) != 1 || get32(packet + 38) != ADDRESS)
            return 0;
        packet[21] = 2; /* a reply, with sender and target exchanged */
        copy(packet + 32, packet + 22, 10);
        copy(packet + 22, mac, 6);
        put32(packet + 28, ADDRESS);
    } else if (bytes >= 42 && get16(packet + 12) == 0x0800) {
        u32 header = (packet[14] & 15) * 4u;
        u8 *udp = packet + 14 + header;
        if (header < 20 || bytes < 14 + header + 8 || packet[23] != 17)
            return 0;
        if (get32(packet + 30) != ADDRESS || get16(udp + 2) != ECHO_PORT)
            return 0;
        swap(packet + 26, packet + 30, 4); /* the header's checksum stays right */
        swap(udp, udp + 2, 2);
        udp[6] = udp[7] = 0; /* no checksum */
        write_pages(PAGES_A_PACKET);
    } else {
        return 0;
    }
    copy(packet, packet + 6, 6);
    copy(packet + 6, mac, 6);
    return 1;
}

static void serve(void)
{
    int slot;
    while (take(&queues[1]) >= 0)
        free_sends++;
    while ((slot = take(&queues[0])) >= 0) {
        struct queue *receives = &queues[0], *sends = &queues[1];
        u32 bytes = receives->used->ring[(u16)(receives->taken - 1) % receives->size].bytes;
        u8 *packet = buffers[0][slot] + HEADER_BYTES;
        if (bytes > HEADER_BYTES && bytes <= BUFFER_BYTES && free_sends > 0
            && answer(packet, bytes - HEADER_BYTES)) {
            u16 to = sends->available->index % sends->size;
            for (u32 byte = 0; byte < HEADER_BYTES; byte++)
                buffers[1][to][byte] = 0;
            copy(buffers[1][to] + HEADER_BYTES, packet, bytes - HEADER_BYTES);
            sends->descriptors[to].bytes = bytes;
            give(sends, to);
            free_sends--;
            out16(ports + 16, 1);
        }
        give(receives, (u16)slot);
        out16(ports + 16, 0);
    }
}

/* Serves packets for ever. Interrupts are let in only while it halts. */
static void serve_all(void)
{
    for (;;) {
        serve();
        if (queues[0].taken == queues[0].used->index)
            asm volatile("sti; hlt; cli" ::: "memory");
    }
}

void go_on(void)
{
    acknowledge();
    serve_all();
}

void run(void)
{
    begin_interrupts();
    write_pages(PAGES);
    if (!begin_nic()) {
        print("\nNIC: none that this guest can drive\n");
        return;
    }
    print("\nREADY\n");
    serve_all();
}
