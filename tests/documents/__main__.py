"""Write what is generated in the documents: `make docs`."""

from tests.documents.files import generated_files

for path, text in generated_files().items():
    if path.read_text() != text:
        path.write_text(text)
        print(f"written: {path}")
