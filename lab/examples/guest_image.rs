//! Builds the images of the lab's guests in out/guest, as `make build` does, and prints what a
//! script needs to boot them: `kernel PATH`, `initrd PATH`, `append TEXT`, and `bare PATH` if gcc
//! can assemble it.

use godwit_lab::image;

fn main() -> anyhow::Result<()> {
    let dir = image::default_dir();
    let built = image::build(&dir)?;
    println!("kernel {}\ninitrd {}", built.kernel.display(), built.initrd.display());
    println!("append {}", image::COMMAND_LINE);
    match image::build_bare(&dir) {
        Ok(bare) => println!("bare {}", bare.display()),
        // Only the tests on KVM need it, and they report its absence.
        Err(error) => eprintln!("no bare guest: {error:#}"),
    }
    Ok(())
}
